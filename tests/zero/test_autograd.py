"""Autograd beyond forward, backward, step, and layers of torch: as in one process."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import (
    TIME,
    WIDTH,
    Block,
    TinyModel,
    feature_batch,
    feature_loss,
    language_batch,
    language_loss,
)
from tests.zero.training import (
    adamw,
    check_against_plain,
    check_equal,
    check_near,
    configuration,
    plain_backward,
    prepared,
    sgd,
    train_prepared,
    train_step,
)
from zero_ext.zero import engine_of


def features_model() -> nn.Module:
    return nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH), Block())


def pair_of(world: World, stage: int, model: nn.Module | None = None) -> tuple[Any, Any, nn.Module]:
    """A prepared model and its optimizer, and a plain twin."""
    torch.manual_seed(world.seed)
    model = features_model() if model is None else model
    twin = copy.deepcopy(model)
    return *prepared(world, model, stage), twin


def check_next_step(world: World, model: Any, optimizer: Any, twin: nn.Module) -> None:
    """A step on one batch is that of the plain twin."""
    feature_loss(model, feature_batch(world.seed, 0, 0, world.rank)).backward()
    assert engine_of(model).prefetcher.live_elements == 0
    optimizer.step()
    plain_backward(world, twin, 0, feature_loss, feature_batch)
    adamw(twin.parameters()).step()
    check_near(model, twin, 2e-5, 2e-6)


@on_ranks(1, 2)
@pytest.mark.parametrize("stage", [1, 3])
def test_two_forwards_then_two_backwards(world: World, stage: int) -> None:
    model, optimizer, twin = pair_of(world, stage)
    plain = adamw(twin.parameters())
    for step in range(3):
        losses = [feature_loss(model, feature_batch(world.seed, step, i, world.rank)) for i in range(2)]
        for loss in reversed(losses):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for rank, micro in itertools.product(range(world.size), range(2)):
            (feature_loss(twin, feature_batch(world.seed, step, micro, rank)) / world.size).backward()
        plain.step()
        plain.zero_grad()
    check_near(model, twin, 2e-5, 2e-6)


@on_ranks(1, 2)
@pytest.mark.parametrize("stage", [0, 3])
def test_retain_graph(world: World, stage: int) -> None:
    model, optimizer, twin = pair_of(world, stage)
    loss = feature_loss(model, feature_batch(world.seed, 0, 0, world.rank))
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    for _ in range(2):
        plain_backward(world, twin, 0, feature_loss, feature_batch)
    adamw(twin.parameters()).step()
    check_near(model, twin, 2e-5, 2e-6)


@on_ranks(2)
def test_backward_twice_without_retained_graph_is_torchs_error_and_the_next_step_is_right(
    world: World,
) -> None:
    for stage in (1, 3):
        model, optimizer, twin = pair_of(world, stage)
        loss = feature_loss(model, feature_batch(world.seed, 9, 0, world.rank))
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        optimizer.zero_grad()
        check_next_step(world, model, optimizer, twin)


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_several_models_and_losses_in_one_process(world: World, stage: int) -> None:
    """A generator and a critic: each loss runs through both, each optimizer steps its own."""
    torch.manual_seed(world.seed)
    models = [features_model(), features_model()]
    twins = copy.deepcopy(models)
    nets, steppers = zip(*(prepared(world, model, stage) for model in models), strict=True)
    plain = [adamw(twin.parameters()) for twin in twins]
    for step in range(3):
        for turn, sign in ((1, 1), (0, -1)):
            batch = feature_batch(world.seed, step, 0, world.rank)
            (sign * nets[1](nets[0](batch)).square().mean()).backward()
            for rank in range(world.size):
                batch = feature_batch(world.seed, step, 0, rank)
                (sign * twins[1](twins[0](batch)).square().mean() / world.size).backward()
            for optimizers in (steppers, plain):
                optimizers[turn].step()
                for optimizer in optimizers:
                    optimizer.zero_grad()
    for net, twin in zip(nets, twins, strict=True):
        check_near(net, twin, 2e-5, 2e-6)


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_gradient_penalty_inside_double_backward(world: World, stage: int) -> None:
    model, optimizer, twin = pair_of(
        world, stage, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    )
    plain = adamw(twin.parameters())

    def penalty(net: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        batch.requires_grad_()
        (gradient,) = torch.autograd.grad(net(batch).sum(), batch, create_graph=True)
        return (gradient.norm(dim=-1) - 1).square().mean()

    for step in range(3):
        with zero_ext.double_backward(model):
            train_step(model, optimizer, penalty(model, feature_batch(world.seed, step, 0, world.rank)))
        plain_backward(world, twin, step, penalty, feature_batch)
        plain.step()
        plain.zero_grad()
    check_near(model, twin, 2e-5, 2e-6)
    assert engine_of(model).prefetcher.live_elements == 0


@on_ranks(2)
def test_autocast(world: World) -> None:
    runs = []
    for stage in (0, 3):
        torch.manual_seed(world.seed)
        model, optimizer = prepared(world, TinyModel(), stage)
        runs.append([])
        for step in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = language_loss(model, language_batch(world.seed, step, 0, world.rank))
            runs[-1].append(train_step(model, optimizer, loss))
    assert runs[0] == runs[1]
    torch.manual_seed(world.seed)
    twin = TinyModel()
    plain = adamw(twin.parameters())
    for step in range(3):
        for rank in range(world.size):
            with torch.autocast("cpu", torch.bfloat16):
                loss = language_loss(twin, language_batch(world.seed, step, 0, rank))
            if rank == world.rank:
                assert abs(loss.item() - runs[0][step]) < 1e-3 * loss.item()
            (loss / world.size).backward()
        plain.step()
        plain.zero_grad()


class Failing(Block):
    when = ""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out = super().forward(hidden)
        if self.when == "forward":
            raise KeyError("in forward")
        if self.when == "backward":
            out.register_hook(lambda _: (_ for _ in ()).throw(KeyError("in backward")))
        return out


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_an_exception_in_forward_or_backward_leaves_nothing_gathered(world: World, stage: int) -> None:
    failing = Failing()
    model, optimizer, twin = pair_of(world, stage, nn.Sequential(Block(), failing, Block()))
    for when in ("forward", "backward"):
        failing.when = when
        with pytest.raises(KeyError, match=when):
            feature_loss(model, feature_batch(world.seed, 7, 0, world.rank)).backward()
        failing.when = ""
    check_next_step(world, model, optimizer, twin)


@on_ranks(2)
def test_a_released_weight_is_fetched_where_it_is_used_and_is_nan_behind_that(world: World) -> None:
    torch.manual_seed(world.seed)
    plain = TinyModel()
    wanted = plain.head.weight.detach().clone()
    model, _ = prepared(world, plain, 3)
    weight = model.head.weight
    assert weight.shape == (23, WIDTH) and weight.numel() == 23 * WIDTH and weight.stride() == (WIDTH, 1)
    ones = torch.ones(1, WIDTH)
    assert torch.equal(functional.linear(ones, weight), functional.linear(ones, wanted))
    with torch._C.DisableTorchFunctionSubclass():
        assert functional.linear(ones, weight).isnan().all()


@on_ranks(2)
def test_autograd_grad_returns_this_ranks_own_gradient(world: World) -> None:
    """No accumulation takes place, so nothing is reduced; the next step is as if it had never been asked."""
    model, optimizer, twin = pair_of(world, 3)
    batch = feature_batch(world.seed, 0, 0, world.rank)
    own, wanted = (
        torch.autograd.grad(feature_loss(net, batch), list(net.parameters())) for net in (model, twin)
    )
    for one, two in zip(own, wanted, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-7)
    assert engine_of(model).prefetcher.live_elements == 0
    assert all(parameter.grad is None for parameter in model.parameters())
    check_next_step(world, model, optimizer, twin)


@on_ranks(2)
def test_hooks_of_the_user_see_full_parameters(world: World) -> None:
    seen: list[bool] = []

    def see(owner: nn.Module, *_: Any) -> None:
        seen.append(bool(owner.weight.isfinite().all()))

    model = features_model()
    for module in (model[0].up, model[1]):
        module.register_forward_pre_hook(see)
        module.register_forward_hook(see)
    model, _ = prepared(world, model)
    model.module[1].register_forward_pre_hook(see)
    feature_loss(model, feature_batch(world.seed, 0, 0, world.rank)).backward()
    assert seen == [True] * 5


class Pixels(nn.Module):
    """A small convolutional net over features seen as an image."""

    def __init__(self, memory_format: torch.memory_format) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(inplace=True),
            nn.Conv2d(6, 4, 2, groups=2),
        ).to(memory_format=memory_format)
        self.head = nn.ConvTranspose2d(4, 1, 2)
        self.memory_format = memory_format

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        image = features.view(-1, 1, 3, 4).contiguous(memory_format=self.memory_format)
        return self.head(self.layers(image))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(23, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 17, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.attention = nn.MultiheadAttention(WIDTH, 3, batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.attention(hidden, hidden, hidden, need_weights=False)[0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(23, WIDTH, mode="sum")
        self.lstm = nn.LSTM(WIDTH, 7, num_layers=2, bidirectional=True, batch_first=True)
        self.gru = nn.GRUCell(14, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.embedding(ids.reshape(-1, 1)).view(*ids.shape, -1))
        return self.gru(hidden[:, -1])


class Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [
                nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
                nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
                nn.GroupNorm(3, WIDTH),
                nn.PReLU(WIDTH),
                nn.Bilinear(WIDTH, WIDTH, 5),
            ]
        )
        self.rms = nn.RMSNorm(5)
        self.tail = nn.Linear(5, 3)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = features
        for block in self.blocks[:4]:
            hidden = block(hidden)
        return self.tail(self.rms(self.blocks[4](hidden, features)))


class Strided(nn.Module):
    """Parameters whose memory order is not contiguous, dense (transposed) or not (strided)."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(7, WIDTH).t())
        self.sparse = nn.Parameter(torch.randn(7, 10)[:, ::2])

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return functional.gelu(features @ self.turned) @ self.sparse


FEATURES: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: Pixels(torch.contiguous_format),
    "channels last": lambda: Pixels(torch.channels_last),
    "parametrized": Parametrized,
    "strided": Strided,
}


def eval_norms(model: nn.Module) -> nn.Module:
    """Batch and spectral norm keep statistics of the data a rank sees; as constants they are comparable."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) or "SpectralNorm" in type(module).__name__:
            module.eval()
    return model


@on_ranks(1, 2)
@pytest.mark.parametrize("name", list(FEATURES))
def test_feature_layers(world: World, name: str) -> None:
    for stage in (1, 3):
        torch.manual_seed(world.seed)
        check_against_plain(
            world, eval_norms(FEATURES[name]()), feature_loss, feature_batch, stage, tolerance=2e-6
        )


class OldWeightNorm(nn.Module):
    """The hook-based weight norm, which sets a plain tensor as ``weight`` before each forward."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.blocks = nn.ModuleList([nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(2)])

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            features = torch.tanh(block(features))
        return features


@on_ranks(2)
def test_old_weight_norm(world: World) -> None:
    runs = []
    for stage in (0, 3):
        torch.manual_seed(world.seed)
        runs.append(train_prepared(world, OldWeightNorm(), feature_loss, feature_batch, configuration(stage)))
    check_equal(*runs)
    assert len(set(runs[0].losses)) == 3


@on_ranks(2)
def test_language_layers(world: World) -> None:
    assert language_batch(0, 0, 0, 0).shape[1] == TIME
    for stage in (1, 3):
        for make in (Attention, Recurrent):
            torch.manual_seed(world.seed)
            check_against_plain(world, make(), feature_loss, language_batch, stage, make_optimizer=sgd)
