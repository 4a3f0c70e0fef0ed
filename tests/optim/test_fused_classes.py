"""What the steppers of all fused classes have in common: groups, unused parameters, what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

import zero_ext
from tests.optim.memory_range import alone, device_tiers, memory_range, step_one
from zero_ext.optim import Segment, make_stepper
from zero_ext.optim.fused import AdamStepper, LionStepper
from zero_ext.optim.lamb_stepper import LambStepper

SEGMENTS = Segment("a", 0, 0, 10, 0), Segment("b", 0, 16, 13, 1)
"""Parameter a in [0, 10), a gap, and b in [16, 29), of another group."""
BOTH = ("exp_avg", "exp_avg_sq")
# Stepper, moments, and the distance from the class. torch's Adam rounds in another order.
CLASSES: dict[type[optim.Optimizer], tuple[type, tuple[str, ...], dict[str, float]]] = {
    optim.Adam: (AdamStepper, BOTH, {"rtol": 1e-5, "atol": 1e-6}),
    optim.AdamW: (AdamStepper, BOTH, {"rtol": 1e-5, "atol": 1e-6}),
    zero_ext.Lamb: (LambStepper, BOTH, {"rtol": 0, "atol": 0}),
    zero_ext.Lion: (LionStepper, ("exp_avg",), {"rtol": 0, "atol": 0}),
}


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_steps_like_the_class_with_groups_and_unused_parameters(
    kind: Any, dtype: torch.dtype, generator: torch.Generator
) -> None:
    wanted, moments, distance = CLASSES[kind]
    master = torch.randn(32, generator=generator)
    twins = [nn.Parameter(master[:10].clone()), nn.Parameter(master[16:29].clone())]
    groups = [{"params": twins[:1]}, {"params": twins[1:], "lr": 0.05, "betas": (0.5, 0.6)}]
    plain = kind(groups, lr=0.1, weight_decay=0.3)
    output = torch.full((32,), float("nan"), dtype=dtype) if dtype != torch.float32 else None
    before = master.clone()
    owned = memory_range(master, output, SEGMENTS)
    stepper = make_stepper(plain, [owned], torch.float32, False, device_tiers(), alone)
    assert isinstance(stepper, wanted)
    for step in range(4):
        gradient = torch.randn(32, generator=generator).to(dtype)
        used = frozenset({"a", "b"} if step % 2 == 0 else {"b"})
        step_one(stepper, gradient, torch.tensor(0.5), used)
        for name, twin, begin in (("a", twins[0], 0), ("b", twins[1], 16)):
            twin.grad = gradient[begin : begin + twin.numel()].float() * 0.5 if name in used else None
        plain.step()
    torch.testing.assert_close(master[:10], twins[0].detach(), **distance)
    torch.testing.assert_close(master[16:29], twins[1].detach(), **distance)
    assert torch.equal(master[10:16], before[10:16]) and torch.equal(master[29:], before[29:])
    if output is not None:
        assert torch.equal(output[:10], master[:10].to(dtype)) and output[10:16].isnan().all()
    found = {(state, segment.name): values for state, segment, values in stepper.values(0)}
    assert found.keys() == {(moment, name) for moment in moments for name in "ab"}
    for moment in moments:
        torch.testing.assert_close(found[moment, "b"], plain.state[twins[1]][moment], **distance)
    if kind is not zero_ext.Lion:  # whose formula counts no steps
        assert stepper.scalars() == {"step": {"a": 2, "b": 4}}
    assert owned.state.allocated_bytes() == (1 + len(moments)) * 4 * 32


@pytest.mark.parametrize("kind", [zero_ext.Lamb, zero_ext.Lion])
def test_8_bits_are_refused_by_name(kind: Any) -> None:
    owned = memory_range(torch.ones(32), None, SEGMENTS)
    expected = rf"precision.moments_dtype: expected Adam or AdamW .*, got {kind.__name__}"
    with pytest.raises(ValueError, match=expected):
        make_stepper(kind([nn.Parameter(torch.ones(1))]), [owned], "8bit", False, device_tiers(), alone)


@pytest.mark.parametrize("kind", [zero_ext.Lamb, zero_ext.Lion])
def test_a_subclass_does_not_count(kind: Any) -> None:
    other = type("Other", (kind,), {})
    with pytest.raises(ValueError, match="is not known to be element-wise"):
        make_stepper(other([nn.Parameter(torch.ones(1))]), [], torch.float32, False, device_tiers(), alone)


def test_lion_rolls_a_step_back() -> None:
    master = torch.ones(32)
    groups = [{"params": [nn.Parameter(torch.ones(1))]} for _ in SEGMENTS]
    owned = memory_range(master, None, SEGMENTS)
    stepper = make_stepper(zero_ext.Lion(groups), [owned], torch.bfloat16, False, device_tiers(), alone)
    stepper.snapshot(0)
    step_one(stepper, torch.ones(32), torch.ones(()), frozenset({"a", "b"}))
    assert master[0] != 1
    stepper.rollback(0)
    assert (master == 1).all() and not any(values.any() for _, _, values in stepper.values(0))
