"""Where parameters sit and who uses them: tied, shared, unused, frozen, unfrozen, empty, mixed, routed."""

from __future__ import annotations

import copy
import math
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
    WIDTH,
    Block,
    TinyModel,
    feature_batch,
    feature_loss,
    language_batch,
    language_loss,
)
from tests.zero.training import (
    Plan,
    adamw,
    check_against_plain,
    check_equal,
    check_near,
    configuration,
    gathered_once,
    language_steps,
    plain_backward,
    prepared,
    train_prepared,
)
from zero_ext.zero import engine_of


class BorrowedWeight(nn.Module):
    """Uses the embedding's weight outside the embedding's forward, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TinyModel(layers=1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.inner.blocks[0](self.inner.embedding(ids))
        return functional.linear(hidden, self.inner.embedding.weight) + self.inner.head(hidden)


class SiblingWeight(nn.Module):
    """A block that reads the weight of its sibling."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        first, second, third = self.blocks
        hidden = first(features)
        hidden = torch.tanh(hidden @ third.weight.t() + second.bias)
        return third(second(hidden))


class Repeated(nn.Module):
    """The same block twice, another one in every second step; with ``some`` where the data says so: on some
    ranks only."""

    def __init__(self, some: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.some = some

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        for block in (self.blocks[0], self.blocks[1], self.blocks[0]):
            features = block(features)
        last = features.sum() > 0 if self.some else len(features) == 2
        return self.blocks[2](features) if last else features


class Unused(nn.Module):
    """Has a whole block and a single weight that no loss reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.loose = nn.Parameter(torch.randn(5))
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.blocks[2](self.blocks[0](features)) * self.gain


class Empty(nn.Module):
    """Holds parameters without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, 3), nn.Linear(3, 2)])
        self.nothing = nn.Parameter(torch.empty(0, 4))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](features)) + self.nothing.sum()


class Mixed(nn.Module):
    """fp32, bf16 and float64 parameters in one block, and integer buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).bfloat16()])
        self.blocks[0].register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.tail = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, 3), nn.Linear(3, 3).bfloat16())])

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        self.blocks[0].calls += 1
        hidden = self.blocks[1](self.blocks[0](features).bfloat16()).float()
        return self.tail[0][1](self.tail[0][0](hidden).bfloat16()).float()


def uneven_batch(seed: int, step: int, micro: int, rank: int) -> torch.Tensor:
    """Two rows in even steps, three in odd ones."""
    return feature_batch(seed, step, micro, rank, size=2 + step % 2)


FEATURE_MODELS: dict[str, Callable[[], nn.Module]] = {
    "sibling": SiblingWeight,
    "repeated": Repeated,
    "unused": Unused,
    "empty": Empty,
}


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("name", list(FEATURE_MODELS))
def test_feature_models(world: World, name: str) -> None:
    for stage in (1, 3):
        torch.manual_seed(world.seed)
        check_against_plain(world, FEATURE_MODELS[name](), feature_loss, uneven_batch, stage)


@on_ranks(2, 3)
def test_a_block_that_some_ranks_use_and_others_do_not(world: World) -> None:
    for stage in (0, 1, 2):
        check_against_plain(world, Repeated(True), feature_loss, feature_batch, stage, Plan(steps=5))


@on_ranks(2, 3)
def test_language_models(world: World) -> None:
    for stage in (0, 1, 2, 3):
        check_against_plain(world, TinyModel(layers=2, tied=True), language_loss, language_batch, stage)
        check_against_plain(world, BorrowedWeight(), language_loss, language_batch, stage)


@on_ranks(2)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_persistent_parameters(world: World, dtype: str) -> None:
    plan, model, runs = Plan(dtype=dtype, clip=0.1), TinyModel(), []
    for units in ({}, {"persistence_threshold": 30}):
        config = configuration(3, plan, units=units)
        runs.append(train_prepared(world, copy.deepcopy(model), language_loss, language_batch, config, plan))
    check_equal(*runs)


@on_ranks(2)
def test_unused_parameters_neither_decay_nor_move_their_moments(world: World) -> None:
    for stage in (0, 1, 2, 3):
        model = Unused()
        before = {name: value.detach().clone() for name, value in model.named_parameters()}
        model, optimizer = prepared(world, model, stage)
        for step in range(2):
            feature_loss(model, feature_batch(world.seed, step, 0, world.rank)).backward()
            assert model.blocks[1].up.weight.grad is None
            optimizer.step()
            optimizer.zero_grad()
        after = zero_ext.full_state_dict(model)
        for name in before:
            unused = name.startswith("blocks.1.") or name == "loose"
            assert torch.equal(before[name], after[name]) == unused, name
        for key, value in optimizer.state_dict()["shards"].items():
            if key.startswith(("exp_avg/blocks.1.", "exp_avg_sq/blocks.1.", "exp_avg/loose")):
                assert not value.any(), key
        assert optimizer.state_dict()["scalars"]["step"]["loose"] == 0


class Routed(nn.Module):
    """Experts of which each rank may take another."""

    def __init__(self, experts: int = 3) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(experts))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = self.entry(features)
        route = int(features[0, 0].abs() * 7) % len(self.experts)
        return hidden + self.experts[route](hidden)


class DecoderLayer(nn.Module):
    """A mixture inside an entry of a stack, which is a block already."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.mixture = Block(), Routed()

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.mixture(self.block(features))


@on_ranks(2, 3)
def test_ranks_run_different_branches_inside_a_leaf_module(world: World) -> None:
    """A parameter used by one rank alone gets the average of its gradient and zeros, as DDP computes it."""
    for stage, leaf in ((1, None), (2, None), (3, "Routed"), (3, "1")):
        torch.manual_seed(world.seed)
        units = {} if leaf is None else {"leaf_modules": [leaf], "block_classes": ["Block"]}
        model = nn.Sequential(Block(), Routed(), Block())
        check_against_plain(world, model, feature_loss, feature_batch, stage, Plan(steps=5), units=units)


@on_ranks(2)
@pytest.mark.parametrize("leaf", ["Routed", "1.mixture"])
def test_a_leaf_module_inside_a_block_is_gathered_with_it(world: World, leaf: str) -> None:
    torch.manual_seed(world.seed)
    model, units = nn.Sequential(DecoderLayer(), DecoderLayer()), {"leaf_modules": [leaf]}
    check_against_plain(world, model, feature_loss, feature_batch, 3, units=units)


def test_a_leaf_or_block_name_that_matches_nothing_is_refused() -> None:
    for key in ("leaf_modules", "block_classes"):
        model = nn.Sequential(Block(), Routed())
        with pytest.raises(ValueError, match=r"got \['Nothing'\](?s:.*)'Routed'"):
            zero_ext.prepare(model, None, {"stage": 3, "units": {key: ["Nothing"]}})


def trainable(parameters: Any) -> torch.optim.Optimizer:
    return adamw([each for each in parameters if each.requires_grad])


def lora(model: nn.Module) -> None:
    """Freezes all but the ``down`` projections of the blocks."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("down" in name)


@on_ranks(1, 2, 3, by_turns=True)
@pytest.mark.parametrize("frozen", ["lora", "embedding", "first", "middle", "last", "norms"])
def test_frozen_parameters(world: World, frozen: str) -> None:
    for stage in (1, 3):
        torch.manual_seed(world.seed)
        model = TinyModel()
        if frozen == "lora":
            lora(model)
        slices = {
            "embedding": [model.embedding],
            "first": [model.embedding, model.blocks[0]],
            "middle": [model.blocks[1]],
            "last": [model.blocks[2], model.head],
            "norms": [module for module in model.modules() if isinstance(module, nn.LayerNorm)],
        }
        for module in slices.get(frozen, []):
            module.requires_grad_(False)
        check_against_plain(world, model, language_loss, language_batch, stage)


@on_ranks(2)
def test_a_frozen_block_is_gathered_twice_a_step_and_never_left_behind(world: World) -> None:
    model = TinyModel()
    lora(model)
    model, optimizer = prepared(world, model, 3, trainable)
    engine = engine_of(model)
    for step in range(3):
        language_loss(model, language_batch(world.seed, step, 0, world.rank)).backward()
        assert engine.prefetcher.live_elements == 0
        optimizer.step()
        optimizer.zero_grad()
    padded = sum(unit.layout.numel for unit in engine.units)
    assert engine.traffic.last_elements["gather"] == 2 * padded - gathered_once(engine)


@on_ranks(2)
def test_unfreezing_after_prepare(world: World) -> None:
    for stage in (0, 1, 2, 3):
        torch.manual_seed(world.seed)
        model = TinyModel()
        twin = copy.deepcopy(model)
        model.blocks[1].requires_grad_(False)
        twin.blocks[1].requires_grad_(False)
        model, optimizer = prepared(world, model, stage)
        plain = adamw(twin.parameters())
        for step in range(4):
            if step == 2:
                model.blocks[1].requires_grad_(True)
                twin.blocks[1].requires_grad_(True)
            language_steps(world, model, optimizer, [step])
            plain_backward(world, twin, step)
            plain.step()
            plain.zero_grad()
        # Adam turns the rounding of a tiny gradient into a part of lr, so single values say little.
        found, wanted = zero_ext.full_state_dict(model), twin.state_dict()
        check_near(found, wanted, 0, 1e-4)
        apart = sum((value - wanted[name]).double().square().sum() for name, value in found.items())
        assert apart <= 1e-12 * sum(value.double().square().sum() for value in wanted.values())


@on_ranks(2)
def test_mixed_dtypes_and_integer_buffers(world: World) -> None:
    runs = []
    for stage in (0, 1, 2, 3):
        torch.manual_seed(world.seed)
        run = train_prepared(world, Mixed(), feature_loss, feature_batch, configuration(stage))
        assert run.parameters["blocks.1.weight"].dtype == torch.bfloat16
        assert run.parameters["blocks.0.weight"].dtype == torch.float32
        assert run.parameters["blocks.0.calls"].item() == 3
        runs.append(run)
    for run in runs[1:]:
        check_equal(run, runs[0])


class WithIntegers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        self.table = nn.Parameter(torch.arange(WIDTH), requires_grad=False)
        self.mask = nn.Parameter(torch.arange(WIDTH) % 2 == 0, requires_grad=False)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](features)[:, self.table] * self.mask


@on_ranks(1, 2)
def test_integer_and_bool_parameters(world: World) -> None:
    for stage in (1, 3):
        torch.manual_seed(world.seed)
        run = train_prepared(
            world, WithIntegers(), feature_loss, feature_batch, configuration(stage), make_optimizer=trainable
        )
        assert torch.equal(run.parameters["table"], torch.arange(WIDTH))
        assert torch.equal(run.parameters["mask"], torch.arange(WIDTH) % 2 == 0)
        assert all(math.isfinite(loss) for loss in run.losses)
