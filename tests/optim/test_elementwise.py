"""torch's optimizers on segments of flat ranges: state by parameter, empty segments, live groups."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim

from tests.optim.memory_range import alone, device_tiers, memory_range, step_one
from zero_ext.optim import Segment, make_stepper
from zero_ext.optim.elementwise import ElementwiseStepper
from zero_ext.optim.fused import AdamStepper
from zero_ext.optim.stepper import StepperInputs

ONE = torch.ones(())


def elementwise(
    optimizer: optim.Optimizer, master: torch.Tensor, output: torch.Tensor | None = None
) -> ElementwiseStepper:
    """Over one range: a in [0, 5), nothing of b, c in [8, 12) of group 1."""
    segments = (Segment("a", 0, 0, 5, 0), Segment("b", 0, 0, 0, 0), Segment("c", 2, 8, 4, 1))
    owned = memory_range(master, output, segments)
    return ElementwiseStepper(StepperInputs(optimizer, [owned], device_tiers().staging))


def momentum() -> optim.SGD:
    param_groups = [
        {"params": [nn.Parameter(torch.ones(1))]},
        {"params": [nn.Parameter(torch.ones(1))], "lr": 0.5},
    ]
    return optim.SGD(param_groups, lr=0.1, momentum=0.9)


def test_steps_segments_only_and_scales_the_gradient() -> None:
    master = torch.randn(16)
    before, output = master.clone(), torch.full((16,), float("nan"), dtype=torch.bfloat16)
    stepper = elementwise(momentum(), master, output)
    gradient = torch.randn(16)
    step_one(stepper, gradient, torch.tensor(2.0), frozenset({"a", "b", "c"}))
    torch.testing.assert_close(master[:5], before[:5] - 0.2 * gradient[:5])
    torch.testing.assert_close(master[8:12], before[8:12] - 1.0 * gradient[8:12])
    assert torch.equal(master[5:8], before[5:8]) and torch.equal(master[12:], before[12:])
    assert torch.equal(output[:5], master[:5].bfloat16()) and output[5:8].isnan().all()


def test_unused_parameters_keep_value_and_state() -> None:
    master = torch.randn(16)
    before = master.clone()
    stepper = elementwise(momentum(), master)
    step_one(stepper, torch.ones(16), ONE, frozenset({"c"}))
    assert torch.equal(master[:5], before[:5])
    assert {(kind, segment.name) for kind, segment, _ in stepper.values(0)} == {("momentum_buffer", "c")}
    step_one(stepper, torch.ones(16), ONE, frozenset({"a"}))
    torch.testing.assert_close(master[:5], before[:5] - 0.1)


def test_groups_are_read_live_and_the_users_optimizer_has_no_state() -> None:
    master = torch.zeros(16)
    optimizer = momentum()
    stepper = elementwise(optimizer, master)
    optimizer.param_groups[0]["lr"] = 0.0
    step_one(stepper, torch.ones(16), ONE, frozenset({"a", "c"}))
    assert not master[:5].any() and (master[8:12] == -0.5).all()
    assert not optimizer.state
    assert stepper.state_bytes() == {"device": 4 * (5 + 4)}


@pytest.mark.parametrize("kind", [optim.SGD, optim.NAdam, optim.ASGD, optim.RMSprop, optim.Adagrad])
def test_state_moves_to_a_fresh_stepper(kind: type[optim.Optimizer]) -> None:
    def make() -> tuple[torch.Tensor, ElementwiseStepper]:
        master = torch.linspace(-1, 1, 16)
        param_groups = [
            {"params": [nn.Parameter(torch.ones(1))]},
            {"params": [nn.Parameter(torch.ones(1))], "lr": 0.02},
        ]
        extra = {"momentum": 0.9} if kind in (optim.SGD, optim.RMSprop) else {}
        return master, elementwise(kind(param_groups, lr=0.01, **extra), master)  # type: ignore[call-arg]

    used = frozenset({"a", "b", "c"})
    gradients = [torch.randn(16) for _ in range(4)]
    master, stepper = make()
    for gradient in gradients[:2]:
        step_one(stepper, gradient, ONE, used)
    copied, other = make()
    copied.copy_(master)
    kinds: dict[str, tuple[str, ...]] = {}
    for name, segment, _ in stepper.values(0):
        kinds[segment.name] = (*kinds.get(segment.name, ()), name)
    other.make_state({**kinds, "c": (*kinds.get("c", ()), "master")})
    other.load_scalars(stepper.scalars())
    values = {(name, segment.name): tensor for name, segment, tensor in stepper.values(0)}
    for name, segment, tensor in other.values(0):
        tensor.copy_(values.pop((name, segment.name)))
    assert not values
    for gradient in gradients[2:]:
        step_one(stepper, gradient, ONE, used)
        step_one(other, gradient, ONE, used)
    assert torch.equal(master, copied)


@pytest.mark.parametrize(
    ("optimizer", "stepper"),
    [
        (optim.AdamW([nn.Parameter(torch.ones(1))]), AdamStepper),
        (optim.SGD([nn.Parameter(torch.ones(1))], 0.1), ElementwiseStepper),
        (optim.AdamW([nn.Parameter(torch.ones(1))], amsgrad=True), ElementwiseStepper),
    ],
    ids=["AdamW", "SGD", "AdamW-amsgrad"],
)
def test_selection(optimizer: optim.Optimizer, stepper: type) -> None:
    segment = [memory_range(torch.zeros(4), None, (Segment("a", 0, 0, 4, 0),))]
    assert isinstance(make_stepper(optimizer, segment, torch.float32, False, device_tiers(), alone), stepper)
