"""zero_ext.Lion by itself against float64, on shards against itself, and on bad input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import zero_ext
from tests.optim.memory_range import alone, device_tiers, memory_range, step_one
from zero_ext.optim import Segment, make_stepper
from zero_ext.optim.fused import LionStepper


def exact_step(weight: Tensor, moment: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
    """One step in float64, in place, straight from the paper; returns the sums whose signs it took."""
    beta1, beta2 = group["betas"]
    g = -gradient.double() if group["maximize"] else gradient.double()
    direction = beta1 * moment + (1 - beta1) * g
    weight -= group["lr"] * (direction.sign() + group["weight_decay"] * weight)
    moment.mul_(beta2).add_((1 - beta2) * g)
    return direction


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_follows_the_paper(dtype: torch.dtype, maximize: bool, generator: torch.Generator) -> None:
    values = [
        torch.randn(7, 13, generator=generator).to(dtype),
        torch.randn(5, generator=generator).to(dtype),
    ]
    weights = [nn.Parameter(values[0].t()), nn.Parameter(values[1])]  # the first is not contiguous
    groups = [{"params": weights[:1], "betas": (0.5, 0.8)}, {"params": weights[1:], "lr": torch.tensor(0.5)}]
    optimizer = zero_ext.Lion(groups, lr=0.25, weight_decay=0.125, maximize=maximize)
    exact = [(weight.detach().double(), torch.zeros_like(weight, dtype=torch.float64)) for weight in weights]
    for _ in range(4):
        for weight, (wanted, moment), group in zip(weights, exact, optimizer.param_groups, strict=True):
            weight.grad = torch.randn(weight.shape, generator=generator).to(dtype)
            unclear = exact_step(wanted.clone(), moment.clone(), weight.grad, group).abs() < 1e-5
            weight.grad[unclear] += 1  # there the sign would be a matter of rounding
            exact_step(wanted, moment, weight.grad, group)
            wanted.copy_(wanted.to(dtype))
        optimizer.step()
        for weight, (wanted, moment) in zip(weights, exact, strict=True):
            clear = moment.abs() > 1e-6
            torch.testing.assert_close(weight.detach()[clear], wanted[clear].to(dtype), rtol=1e-2, atol=1e-5)
            stored = optimizer.state[weight]["exp_avg"]
            assert stored.dtype == torch.float32 and stored.shape == weight.shape
            torch.testing.assert_close(stored, moment.float(), rtol=1e-5, atol=1e-6)


def test_state_survives_saving_and_unused_parameters_stay() -> None:
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    first = zero_ext.Lion([used, unused], lr=0.1)
    used.grad = torch.tensor([1.0, -1.0, 0.0])
    assert first.step(lambda: 7) == 7
    assert torch.equal(used.detach(), torch.tensor([0.9, 1.1, 1.0])) and not first.state[unused]
    copied = nn.Parameter(used.detach().clone())
    second = zero_ext.Lion([copied, unused])
    second.load_state_dict(first.state_dict())
    copied.grad = used.grad = torch.tensor([-0.01, 0.01, -3.0])  # the moment outweighs the first two
    first.step()
    second.step()
    assert torch.equal(copied, used)
    torch.testing.assert_close(used.detach(), torch.tensor([0.8, 1.2, 1.1]))


def test_half_precision_state_of_a_loaded_checkpoint_steps() -> None:
    # torch casts the state that it loads to the parameter's dtype.
    for dtype in (torch.float16, torch.bfloat16):
        weight = nn.Parameter(torch.ones(4, dtype=dtype))
        optimizer = zero_ext.Lion([weight], lr=0.25)
        weight.grad = torch.ones(4, dtype=dtype)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.state[weight]["exp_avg"].dtype == dtype
        optimizer.step()
        assert torch.equal(weight.detach(), torch.full((4,), 0.5, dtype=dtype))
        torch.testing.assert_close(
            optimizer.state[weight]["exp_avg"].float(), torch.full((4,), 0.0199), rtol=0.01, atol=0
        )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: zero_ext.Lion(p, lr=-1.0), "lr: expected .*, got -1.0"),
        (lambda p: zero_ext.Lion(p, lr=float("nan")), "lr: expected .*, got nan"),
        (
            lambda p: zero_ext.Lion(p, betas=(0.9, 1.0)),
            r"betas: expected two numbers in \[0, 1\), got \(0.9, 1.0\)",
        ),
        (lambda p: zero_ext.Lion(p, weight_decay=float("inf")), "weight_decay: expected .*, got inf"),
    ],
)
def test_refuses_hyper_parameters_by_name(make: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make([nn.Parameter(torch.ones(1))])


def test_refuses_what_it_cannot_step() -> None:
    double = nn.Parameter(torch.ones(2, dtype=torch.float64))
    double.grad = torch.ones(2, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"param group 0, parameter 0: expected float32.*, got torch.float64"):
        zero_ext.Lion([double]).step()
    sparse = nn.Parameter(torch.ones(2))
    sparse.grad = torch.ones(2).to_sparse()
    with pytest.raises(RuntimeError, match="parameter 1: expected a dense gradient, got a sparse one"):
        zero_ext.Lion([nn.Parameter(torch.ones(2)), sparse]).step()


def segments() -> tuple[Segment, ...]:
    """Parameter a in [0, 10), a gap, and b in [16, 29), of another group."""
    return Segment("a", 0, 0, 10, 0), Segment("b", 0, 16, 13, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_stepper_steps_like_the_class_with_groups_and_unused_parameters(
    dtype: torch.dtype, generator: torch.Generator
) -> None:
    master = torch.randn(32, generator=generator)
    twins = [nn.Parameter(master[:10].clone()), nn.Parameter(master[16:29].clone())]
    groups = [{"params": twins[:1]}, {"params": twins[1:], "lr": 0.05, "betas": (0.5, 0.6)}]
    plain = zero_ext.Lion(groups, lr=0.1, weight_decay=0.3)
    output = torch.full((32,), float("nan"), dtype=dtype) if dtype != torch.float32 else None
    before = master.clone()
    owned = memory_range(master, output, segments())
    stepper = make_stepper(plain, [owned], torch.float32, False, device_tiers(), alone)
    assert isinstance(stepper, LionStepper)
    for step in range(4):
        gradient = torch.randn(32, generator=generator).to(dtype)
        used = frozenset({"a", "b"} if step % 2 == 0 else {"b"})
        step_one(stepper, gradient, torch.tensor(0.5), used)
        for name, twin, begin in (("a", twins[0], 0), ("b", twins[1], 16)):
            twin.grad = gradient[begin : begin + twin.numel()].float() * 0.5 if name in used else None
        plain.step()
    assert torch.equal(master[:10], twins[0]) and torch.equal(master[16:29], twins[1])
    assert torch.equal(master[10:16], before[10:16]) and torch.equal(master[29:], before[29:])
    if output is not None:
        assert torch.equal(output[:10], master[:10].to(dtype)) and output[10:16].isnan().all()
    found = {(kind, segment.name): values for kind, segment, values in stepper.values(0)}
    assert found.keys() == {("exp_avg", "a"), ("exp_avg", "b")}
    assert torch.equal(found["exp_avg", "b"], plain.state[twins[1]]["exp_avg"])
    assert owned.state.allocated_bytes() == 4 * 32 + 4 * 32


def test_the_stepper_rolls_a_step_back() -> None:
    master = torch.ones(32)
    optimizer = zero_ext.Lion(
        [{"params": [nn.Parameter(torch.ones(1))]}, {"params": [nn.Parameter(torch.ones(1))]}]
    )
    stepper = make_stepper(
        optimizer, [memory_range(master, None, segments())], torch.bfloat16, False, device_tiers(), alone
    )
    stepper.snapshot(0)
    step_one(stepper, torch.ones(32), torch.ones(()), frozenset({"a", "b"}))
    assert master[0] != 1
    stepper.rollback(0)
    assert (master == 1).all() and not any(values.any() for _, _, values in stepper.values(0))


def test_8_bits_are_refused_by_name() -> None:
    owned = memory_range(torch.ones(32), None, segments())
    optimizer = zero_ext.Lion([nn.Parameter(torch.ones(1))])
    with pytest.raises(ValueError, match=r"precision.moments_dtype: expected Adam or AdamW .*, got Lion"):
        make_stepper(optimizer, [owned], "8bit", False, device_tiers(), alone)


def test_a_subclass_does_not_count_as_lion() -> None:
    kind = type("Other", (zero_ext.Lion,), {})
    assert issubclass(kind, optim.Optimizer)
    with pytest.raises(ValueError, match="is not known to be element-wise"):
        make_stepper(kind([nn.Parameter(torch.ones(1))]), [], torch.float32, False, device_tiers(), alone)
