"""Parameters are there wherever a model or its loop uses them: losses and values are those of plain torch."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import WIDTH, feature_batch
from tests.zero.training import adamw, check_near, configuration, prepared, train_step
from zero_ext.zero import engine_of
from zero_ext.zero.memory.gathered_unit import UnitState


class Returned(nn.Module):
    """Returns what ``view`` makes of its own parameter."""

    def __init__(self, view: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.view = view

    def forward(self) -> Any:
        return self.view(self.table)


class UsesReturned(nn.Module):
    """Uses such a return value where autograd saves it, after a layer and before one."""

    def __init__(self, view: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), Returned(view), nn.Linear(WIDTH, WIDTH)])

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        value = self.blocks[1]()
        while not isinstance(value, torch.Tensor):
            value = next(iter(value.values() if isinstance(value, Mapping) else value))
        hidden = self.blocks[0](features) * value.sum(0).flatten()[:WIDTH] @ value.reshape(-1, WIDTH)[:3].T
        return self.blocks[2](functional.pad(hidden, (0, WIDTH - 3)))


@dataclass(frozen=True)
class FrozenOutput(Mapping[str, Any]):
    """A mapping that no dict makes, with a tuple that needs no copy in it."""

    view: torch.Tensor
    sizes: tuple[int, ...] = (2, 3)

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return iter(("view", "sizes"))

    def __len__(self) -> int:
        return 2


VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "the parameter": lambda p: p,
    "rows": lambda p: p[:5],
    "transposed": lambda p: p.t(),
    "a new axis": lambda p: p[None],
    "expanded": lambda p: p.unsqueeze(0).expand(4, -1, -1),
    "in a tuple": lambda p: (p[1:], p),
    "in a mapping": lambda p: {"table": p.view(-1, WIDTH)},
    "in a list": lambda p: [p.flip(0), p[0]],
    "in a frozen dataclass that is a mapping": lambda p: FrozenOutput(p[1:]),
    "in a mapping that cannot be changed": lambda p: MappingProxyType({"view": p[1:]}),
    "detached": lambda p: p.detach(),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.inner(features).tanh() * self.gain

    def project(self, features: torch.Tensor) -> torch.Tensor:
        """A method that is no forward."""
        return functional.linear(features, self.inner.weight, self.inner.bias) * self.gain


class Model(nn.Module):
    """Blocks around ``use``, which is called in forward with the model and what the first block returned."""

    def __init__(
        self, use: Callable[[Any, torch.Tensor], torch.Tensor] = lambda model, hidden: hidden
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.shared = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.weights = [block.inner.weight for block in self.blocks]
        self.use = use

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = self.use(self, self.blocks[0](features))
        return self.blocks[2](self.blocks[1](hidden) @ self.shared)


def momentum_update(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """The target network of BYOL and MoCo follows inside forward."""
    for target, online in zip(model.blocks[2].parameters(), model.blocks[1].parameters(), strict=True):
        target.data = target.data * 0.9 + online.data * 0.1
    return hidden


def masked_weight(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """PixelCNN: the weight is masked through ``data`` before it is used."""
    model.blocks[1].inner.weight.data *= torch.ones(WIDTH, WIDTH).tril()
    return hidden


def in_place_on_a_view(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """A three-dimensional linear layer returns a view, which is added to in place."""
    batch = model.blocks[0].inner(hidden[None])
    batch += hidden
    batch[:, :, 0] = 0.0
    return batch[0]


def functional_call(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    scaled = {name: parameter * 1.5 for name, parameter in model.blocks[1].named_parameters()}
    return torch.func.functional_call(model.blocks[1], scaled, (hidden,))


INSIDE: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "parameters() of another block": lambda m, h: h * sum(p.norm() for p in m.blocks[2].parameters()),
    "named_parameters() of the model": lambda m, h: h + sum(p.mean() for _, p in m.named_parameters()),
    "a list of parameters": lambda m, h: h @ m.weights[2].t() + functional.linear(h, m.weights[1]),
    "concatenated views": lambda m, h: h * torch.cat([p.view(-1) for p in m.parameters()]).std(),
    "a method of another block": lambda m, h: m.blocks[2].project(h),
    "a module inside another block": lambda m, h: m.blocks[2].inner(h),
    "a weight of another block": lambda m, h: h @ m.blocks[2].inner.weight[:, :].T,
    "functional_call with scaled parameters": functional_call,
    "in place on a view": in_place_on_a_view,
    "checkpoint, reentrant": lambda m, h: checkpoint(m.blocks[1].project, h, use_reentrant=True),
    "checkpoint, not reentrant": lambda m, h: checkpoint(m.blocks[2], h, use_reentrant=False),
    "momentum update": momentum_update,
    "masked weight": masked_weight,
}


def block_penalty(model: Any, loss: torch.Tensor) -> torch.Tensor:
    return loss + 0.1 * sum(p.square().sum() for p in model.parameters()) + model.shared[1:3].exp().sum()


def gradient_penalty(model: Any, loss: torch.Tensor) -> torch.Tensor:
    features = feature_batch(7, 0, 0, 0).requires_grad_()
    (gradient,) = torch.autograd.grad(model(features).square().sum(), features, create_graph=True)
    return gradient.square().sum()


# Each is positive, so that a relative comparison of losses does not meet a sum that cancels.
LOOP: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "penalty": block_penalty,
    "vector of all": lambda m, x: nn.utils.parameters_to_vector(m.parameters()).sin().square().sum(),
    "an inner module": lambda m, x: m.blocks[1].inner(feature_batch(3, 0, 0, 0)).square().sum(),
    "a method": lambda m, x: m.blocks[0].project(feature_batch(4, 0, 0, 0)).square().sum(),
    "a weight": lambda m, x: (feature_batch(5, 0, 0, 0) @ m.weights[0].T).tanh().square().sum(),
    "differentiated twice": gradient_penalty,
    "a view used twice": lambda m, x: (lambda w: (w @ w.detach().T).square().sum() + w.square().sum())(
        m.shared[:4]
    ),
    "functional_call": lambda m, x: (
        torch.func.functional_call(
            m, {name: p * 0.5 for name, p in m.named_parameters()}, (feature_batch(6, 0, 0, 0),)
        )
        .square()
        .sum()
    ),
}


def unwrapped(model: nn.Module) -> Any:
    return getattr(model, "module", model)


def check_same(world: World, make: Callable[[], nn.Module], after: Callable[..., torch.Tensor]) -> None:
    """Trains ``make()`` for three steps in plain torch and in stage 3, with ``after`` applied to its loss."""
    torch.manual_seed(world.seed)
    plain: Any = make()
    torch.manual_seed(world.seed)
    model, optimizer = prepared(world, make())
    reference = adamw(plain.parameters())
    for step in range(3):
        losses = []
        for module, stepped in ((plain, reference), (model, optimizer)):
            loss = module(feature_batch(world.seed, step, 0, 0)).square().mean()
            losses.append(train_step(module, stepped, after(unwrapped(module), loss)))
        assert losses[1] == pytest.approx(losses[0], rel=1e-5), step
    check_near(model, plain)
    engine = engine_of(model)
    assert all(unit.state is UnitState.RELEASED for unit in engine.units if unit.placement.params)


@on_ranks(2)
@pytest.mark.parametrize("view", list(VIEWS))
def test_modules_that_return_their_own_parameter(world: World, view: str) -> None:
    check_same(world, lambda: UsesReturned(VIEWS[view]), lambda model, loss: loss)


@on_ranks(2)
@pytest.mark.parametrize("use", list(INSIDE))
def test_uses_inside_forward(world: World, use: str) -> None:
    check_same(world, lambda: Model(INSIDE[use]), lambda model, loss: loss)


@on_ranks(2)
@pytest.mark.parametrize("use", list(LOOP))
def test_uses_in_the_loop(world: World, use: str) -> None:
    check_same(world, Model, lambda model, loss: loss + LOOP[use](model, loss))


@on_ranks(2)
def test_uses_without_autograd_see_the_present_value(world: World) -> None:
    torch.manual_seed(world.seed)
    plain = Model()
    model, _ = zero_ext.prepare(copy.deepcopy(plain), None, configuration(3), process_group=world.group)
    inner = unwrapped(model)
    features = feature_batch(world.seed, 0, 0, 0)
    stored = inner.blocks[0].inner.weight.data[1:3]  # a view that is kept
    with torch.no_grad():
        assert torch.equal(inner.blocks[1].inner(features), plain.blocks[1].inner(features))
        assert torch.equal(inner.blocks[1].project(features), plain.blocks[1].project(features))
        inner.blocks[0].inner.weight.mul_(2.0)
    with torch.inference_mode():
        assert torch.equal(stored, plain.blocks[0].inner.weight[1:3] * 2.0)
    weight = inner.blocks[0].inner.weight
    assert weight.tolist() == (plain.blocks[0].inner.weight * 2.0).tolist()
    assert weight.detach().numpy().sum() == pytest.approx(weight.sum().item(), rel=1e-5)
    assert "blocks.0.inner.weight" in repr(weight) and torch.zeros_like(weight).device.type == "cpu"
    assert len(list(weight)) == WIDTH and weight[0].shape == (WIDTH,)


@on_ranks(2)
def test_penalties_hold_one_unit_at_a_time(world: World) -> None:
    model, _ = prepared(world, Model(), 3, None)
    units, most = engine_of(model).units, [0]

    def watch(_: object) -> None:
        most.append(sum(unit.layout.numel for unit in units if unit.state is UnitState.GATHERED))

    engine_of(model).subscribe(watch)
    sum(parameter.square().sum() for parameter in model.parameters()).backward()
    assert 0 < max(most) <= max(unit.layout.numel for unit in units)


@on_ranks(2)
def test_a_backward_that_would_use_other_values_raises(world: World) -> None:
    plain = Model()
    model, optimizer = prepared(world, plain)
    features = feature_batch(world.seed, 0, 0, 0)
    stale = model(features).sum()
    penalty = model.shared.square().sum()
    model(features).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"'shared'.*updated or written to since"):
        penalty.backward()


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "data_ptr": (lambda m: m.shared.data_ptr(), r"'shared'.*got data_ptr"),
    "storage": (lambda m: m.shared.untyped_storage(), r"'shared'.*got untyped_storage"),
    "dlpack": (lambda m: m.shared.detach().__dlpack__(), r"'shared'.*dlpack"),
    "pickle": (pickle.dumps, "pickling a prepared model.*full_state_dict"),
    "jacrev": (
        lambda m: torch.func.jacrev(lambda x: m(x).sum(0))(feature_batch(0, 0, 0, 0)),
        r"torch\.func transform.*gathered",
    ),
    "trace": (lambda m: torch.jit.trace(m, feature_batch(0, 0, 0, 0)), r"torch\.jit\.trace of a prepared"),
    "write that autograd records": (lambda m: m.shared.mul_(2.0), "'shared', which requires grad.*no_grad"),
}


@on_ranks(2)
@pytest.mark.parametrize("use", list(REFUSED))
def test_uses_that_cannot_be_right_are_refused_by_name(world: World, use: str) -> None:
    plain = Model()
    model, optimizer = prepared(world, plain)
    action, message = REFUSED[use]
    with pytest.raises(RuntimeError, match=f"(?s){message}"):
        action(unwrapped(model))
    optimizer.zero_grad()
    model(feature_batch(world.seed, 0, 0, 0)).sum().backward()
    optimizer.step()


STORED_VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda p: p.t(),
    "rows": lambda p: p[2:5],
    "detached": lambda p: p.detach(),
    "data": lambda p: p.data.view(-1)[::2],
}


class StoresView(nn.Module):
    """Stores a view of its weight after its call."""

    def __init__(self, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.view, self.stored = nn.Linear(WIDTH, WIDTH), view, torch.empty(0)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        self.stored = self.view(self.layer.weight)
        return self.layer(features)


@on_ranks(2)
@pytest.mark.parametrize("dtype", ["keep", "bf16", "fp16"])
@pytest.mark.parametrize("view", list(STORED_VIEWS))
def test_a_view_stored_after_its_block_is_nan_and_detected(world: World, view: str, dtype: str) -> None:
    """Nothing tells the engine of a read of such a view, which has no memory of its own."""
    model: Any = nn.Sequential(StoresView(STORED_VIEWS[view]), nn.Linear(WIDTH, WIDTH))
    model, optimizer = prepared(world, model, precision={"dtype": dtype}, units={"prefetch_elements": 0})
    features = feature_batch(world.seed, 0, 0, world.rank)
    with torch.no_grad():
        model(features)
        stored = model.module[0].stored
        assert stored.isnan().all() and (stored + 1).isnan().all() and stored.clone().float().sum().isnan()
        factor = stored.float().mean()
    model.backward(model(features).square().mean() * factor)
    if dtype == "fp16":
        assert not optimizer.step()
    else:
        with pytest.raises(FloatingPointError, match=r"expected finite values"):
            optimizer.step()
    optimizer.zero_grad()
    model.backward(model(features).square().mean())
    optimizer.step()
    with torch.no_grad():
        stored.fill_(0.5)
    with pytest.raises(RuntimeError, match=r"'0\.layer\.weight' was written to through a view"):
        model(features)
