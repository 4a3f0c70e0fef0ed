"""What blocks may take and return, and what may be done with it: containers, views, in-place operations."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import WIDTH, Block, feature_batch, feature_loss
from tests.zero.training import adamw, check_against_plain, check_near, prepared, train_step
from zero_ext.zero import engine_of


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    extra: Any = None


Pair = namedtuple("Pair", ["left", "right"])


class Opaque:
    """Hides a tensor from whoever looks for one."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Returning(Block):
    """A block that returns its hidden states in some container."""

    def __init__(self, pack: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.pack = pack

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.pack(super().forward(hidden))


class Stack(nn.Module):
    """Blocks between which ``unpack`` turns an output into the next input."""

    def __init__(self, blocks: list[nn.Module], unpack: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.unpack = unpack

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = self.entry(features)
        for block in self.blocks:
            hidden = self.unpack(block(hidden))
        return hidden


def half_views(hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return hidden.chunk(2, dim=-1)


CONTAINERS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "dict": (lambda h: {"a": h, "n": 3}, lambda out: out["a"]),
    "ordered dict": (lambda h: OrderedDict(a=h, b=None), lambda out: out["a"]),
    "dataclass": (lambda h: Output(h, "text"), lambda out: out.hidden),
    "nested": (lambda h: (h * 2, [{"x": (h, None)}], 1), lambda out: out[1][0]["x"][0] + out[0]),
    "namedtuple": (lambda h: Pair(h, h + 1), lambda out: out.left - out.right * 2),
    "views": (half_views, lambda out: torch.cat([out[1], out[0]], -1)),
    "one view": (lambda h: h[:, :].view(h.shape), lambda out: out),
    "transposed": (lambda h: h.t(), lambda out: out.t()),
}


def zero_first(hidden: torch.Tensor) -> torch.Tensor:
    hidden[:, 0] = 0
    return hidden


INPLACE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mul_": lambda hidden: hidden.mul_(1.5),
    "setitem": zero_first,
    "relu_": torch.relu_,
    "add_": lambda hidden: hidden.add_(1),
}


@on_ranks(2)
@pytest.mark.parametrize("name", list(CONTAINERS))
def test_containers(world: World, name: str) -> None:
    pack, unpack = CONTAINERS[name]
    check_against_plain(
        world, Stack([Returning(pack) for _ in range(3)], unpack), feature_loss, feature_batch, 3
    )


@on_ranks(2)
@pytest.mark.parametrize("name", list(INPLACE))
def test_in_place_operations_on_outputs(world: World, name: str) -> None:
    check_against_plain(
        world, Stack([Block() for _ in range(3)], INPLACE[name]), feature_loss, feature_batch, 3
    )


class KeywordBlock(nn.Module):
    """Takes its inputs by keyword, nested, some without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, *, state: dict[str, Any], flag: bool = True) -> dict[str, Any]:
        hidden, mask = state["pair"]
        return {"pair": (self.inner(hidden) * mask, mask), "flag": flag}


class KeywordStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(KeywordBlock() for _ in range(3))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        state: dict[str, Any] = {"pair": (features, (features > 0).float())}
        for block in self.blocks:
            state = block(state=state, flag=False)
        return state["pair"][0]


@on_ranks(2)
def test_keyword_inputs_and_dict_outputs(world: World) -> None:
    check_against_plain(world, KeywordStack(), feature_loss, feature_batch, 3)


def opaque_stack() -> nn.Module:
    return Stack([Returning(Opaque), Returning(Opaque)], lambda out: out.value)


@on_ranks(2)
def test_an_output_without_reachable_tensors_retains_its_parameters_until_the_step(world: World) -> None:
    torch.manual_seed(world.seed)
    plain, features = opaque_stack(), feature_batch(world.seed, 0, 0, 0)
    model, optimizer = prepared(world, copy.deepcopy(plain))
    reference = adamw(plain.parameters())
    with pytest.warns(RuntimeWarning, match=r"block 'blocks.0' returned Opaque(?s:.*)double_backward"):
        loss = feature_loss(model, features)
    train_step(model, optimizer, loss)
    assert engine_of(model).prefetcher.live_elements == 0
    train_step(plain, reference, feature_loss(plain, features))
    check_near(model, plain, 1e-5, 1e-7)


@on_ranks(2)
def test_an_output_without_reachable_tensors_inside_double_backward(world: World) -> None:
    torch.manual_seed(world.seed)
    plain, features = opaque_stack(), feature_batch(world.seed, 0, 0, 0)
    model, _ = prepared(world, copy.deepcopy(plain))
    feature_loss(plain, features).backward()
    with zero_ext.double_backward(model):
        feature_loss(model, features).backward()
    for parameter, true in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(zero_ext.full_gradient(parameter), true.grad, rtol=1e-5, atol=1e-7)


class Auxiliary(nn.Module):
    """Blocks keep a loss of their own, as routers do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.retained: list[torch.Tensor] = []

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        self.retained = []
        for block in self.blocks:
            features = block(features)
            self.retained.append((block.up.weight.sum() * 0.01) ** 2 + features.mean() ** 2)
        return features


def auxiliary_loss(model: nn.Module, features: torch.Tensor) -> torch.Tensor:
    loss = model(features).square().mean()
    return loss + sum(model.retained)


@on_ranks(2)
def test_auxiliary_losses_stored_on_modules(world: World) -> None:
    for stage in (1, 3):
        check_against_plain(world, Auxiliary(), auxiliary_loss, feature_batch, stage)
