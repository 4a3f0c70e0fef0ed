"""Settings of Muon's sharded step: refused ones leave all as it was, and each is read once per step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.optim.full_tensors.test_muon import MIXED, SETTINGS, Mixed, ids_of
from tests.optim.full_tensors.test_muon_groups import CHANGES
from tests.zero.training import check_same, configuration

# When updates run, the norm that gradients are clipped to, and when settings change.
MOMENTS = [
    ("after_backward", 0.0, "before the step"),
    ("in_backward", 0.0, "before backward"),
    ("in_backward", 1e3, "before backward"),
    ("in_backward", 1e3, "before the step"),
]


def prepared(world: World, mode: str, clipping: float) -> tuple[Any, Any]:
    model = Mixed(world.seed)
    config = configuration(2, offload={"update_mode": mode}, gradient_clipping=clipping, **MIXED)
    return zero_ext.prepare(
        model, zero_ext.Muon(model.parameters(), **SETTINGS), config, process_group=world.group
    )


def state_of(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """The parameters and the optimizer's shards, copied."""
    shards = {key: value.clone() for key, value in optimizer.state_dict()["shards"].items()}
    return shards | zero_ext.full_state_dict(model, rank0_only=False)


def backward(world: World, model: Any, step: int, factor: float = 1.0) -> None:
    (model(ids_of(world.seed, step, world.rank)) * factor).backward()


@on_ranks(1, 2, by_turns=True)
@pytest.mark.parametrize(("mode", "clipping", "when"), MOMENTS)
def test_settings_that_are_refused_change_nothing(
    world: World, mode: str, clipping: float, when: str
) -> None:
    """Neither what AdamW steps. The step is made after a correction."""
    model, optimizer = prepared(world, mode, clipping)
    for step in range(1 + len(CHANGES)):
        backward(world, model, step)
        optimizer.step()
        optimizer.zero_grad()
    wanted = state_of(model, optimizer)
    model, optimizer = prepared(world, mode, clipping)
    backward(world, model, 0)
    optimizer.step()
    optimizer.zero_grad()
    for step, (index, change, words) in enumerate(CHANGES, 1):
        group = optimizer.param_groups[index]
        before, settings = state_of(model, optimizer), {key: group[key] for key in change}
        changes: list[Callable[[], None]] = [
            lambda group=group, change=change: group.update(change),
            lambda step=step: backward(world, model, step),
        ]
        for act in changes if when == "before backward" else reversed(changes):
            act()
        with pytest.raises(ValueError, match=words):
            optimizer.step()
        check_same(state_of(model, optimizer), before, words)
        group.update(settings)
        optimizer.step()
        optimizer.zero_grad()
    check_same(state_of(model, optimizer), wanted)


@on_ranks(2)
@pytest.mark.parametrize(("mode", "clipping"), sorted({(mode, clipping) for mode, clipping, _ in MOMENTS}))
def test_a_gradient_that_is_not_finite_on_one_rank_changes_nothing(
    world: World, mode: str, clipping: float
) -> None:
    model, optimizer = prepared(world, mode, clipping)
    backward(world, model, 0)
    optimizer.step()
    optimizer.zero_grad()
    before = state_of(model, optimizer)
    backward(world, model, 1, math.nan if world.rank else 1.0)
    with pytest.raises(FloatingPointError, match="gradients"):
        optimizer.step()
    check_same(state_of(model, optimizer), before)


class ReadCounting(torch.Tensor):
    """A number that counts how often it is read from its device."""

    reads = 0

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Any = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        read = (torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__float__, torch.Tensor.__bool__)
        cls.reads += function in read
        return super().__torch_function__(function, types, arguments, keywords or {})


@on_ranks(1)
def test_a_rate_on_a_device_is_read_once_for_all_matrices(world: World) -> None:
    def trained(layers: int, lr: Any) -> tuple[int, dict[str, torch.Tensor]]:
        torch.manual_seed(world.seed)
        model: Any = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
        optimizer = zero_ext.Muon(model.parameters(), lr=lr, adamw={"lr": 1e-3})
        model, optimizer = zero_ext.prepare(
            model, optimizer, configuration(2, **MIXED), process_group=world.group
        )
        model(torch.randn(3, 8)).square().sum().backward()
        before = ReadCounting.reads
        optimizer.step()
        return ReadCounting.reads - before, zero_ext.full_state_dict(model)

    rate = torch.tensor(0.02).as_subclass(ReadCounting)
    few, _ = trained(1, rate)
    reads, found = trained(6, rate)
    assert reads == few > 0
    check_same(found, trained(6, torch.tensor(0.02).item())[1])


def test_a_rate_on_a_device_is_read_once_without_the_engine() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    optimizer = zero_ext.Muon(model.parameters(), lr=torch.tensor(0.02).as_subclass(ReadCounting))
    model(torch.ones(3, 8)).square().sum().backward()
    before = ReadCounting.reads
    optimizer.step()
    assert ReadCounting.reads - before == 1
