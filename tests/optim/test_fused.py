"""The fused Adam stepper on hand-made ranges: segments, groups, per-parameter steps, state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

import zero_ext
from tests.optim.memory_range import device_tiers, memory_range, step_one
from zero_ext.optim import OwnedRange, Segment
from zero_ext.optim.fused import AdamStepper
from zero_ext.optim.stepper import StepperInputs

ONE = torch.ones(())


def two_parameters(generator: torch.Generator) -> tuple[torch.Tensor, tuple[Segment, ...]]:
    """A range [32] with parameter a in [0, 10), a gap, and b in [16, 29)."""
    return torch.randn(32, generator=generator), (Segment("a", 0, 0, 10, 0), Segment("b", 0, 16, 13, 1))


def two_groups() -> optim.AdamW:
    return optim.AdamW(
        [{"params": [nn.Parameter(torch.ones(1))]}, {"params": [nn.Parameter(torch.ones(1))], "lr": 0.5}],
        lr=0.1,
    )


def adam(
    optimizer: optim.Optimizer, owned: OwnedRange, moments_dtype: torch.dtype = torch.float32
) -> AdamStepper:
    return AdamStepper(StepperInputs(optimizer, [owned], device_tiers().staging, moments_dtype))


def test_hyper_parameters_are_read_live() -> None:
    master, segments = two_parameters(torch.Generator().manual_seed(1))
    optimizer = two_groups()
    live = optimizer.param_groups
    stepper = adam(optimizer, memory_range(master, None, segments))
    before = master.clone()
    for group in live:
        group["lr"], group["weight_decay"] = 0.0, 0.0
    step_one(stepper, torch.ones(32), ONE, frozenset({"a", "b"}))
    assert torch.equal(master, before)
    live[1]["lr"] = torch.tensor(0.25)
    step_one(stepper, torch.ones(32), ONE, frozenset({"a", "b"}))
    assert torch.equal(master[:10], before[:10])
    torch.testing.assert_close(master[16:29], before[16:29] - 0.25)


def test_state_is_listed_by_parameter_and_restored() -> None:
    master, segments = two_parameters(torch.Generator().manual_seed(1))
    owned = memory_range(master, None, segments)
    stepper = adam(two_groups(), owned, torch.bfloat16)
    step_one(stepper, torch.ones(32), ONE, frozenset({"a"}))
    found = {(kind, segment.name): tensor for kind, segment, tensor in stepper.values(0)}
    assert {key: tensor.numel() for key, tensor in found.items()} == {
        (kind, name): numel for kind in ("exp_avg", "exp_avg_sq") for name, numel in (("a", 10), ("b", 13))
    }
    assert found["exp_avg", "a"].eq(torch.tensor(0.1).bfloat16()).all() and not found["exp_avg", "b"].any()
    assert owned.state.allocated_bytes() == 4 * 32 + 2 * 2 * 32
    other = adam(two_groups(), memory_range(master.clone(), None, segments), torch.bfloat16)
    other.load_scalars(stepper.scalars())
    assert other.scalars() == {"step": {"a": 1, "b": 0}}


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [
        ("lr", float("nan"), "lr"),
        ("eps", -1.0, "eps"),
        ("betas", (1.5, 0.9), "beta1"),
        ("weight_decay", float("inf"), "weight_decay"),
    ],
)
def test_hyper_parameters_gone_bad_are_refused_by_name_and_nothing_moves(
    key: str, value: Any, name: str
) -> None:
    model = nn.Linear(3, 2)
    prepared, optimizer = zero_ext.prepare(model, optim.AdamW(model.parameters()), {"stage": 3})
    optimizer.param_groups[0][key] = value
    prepared(torch.ones(1, 3)).sum().backward()
    before = zero_ext.full_state_dict(prepared)
    with pytest.raises((RuntimeError, ValueError), match=name):
        optimizer.step()
    assert all(torch.equal(value, before[key]) for key, value in zero_ext.full_state_dict(prepared).items())
