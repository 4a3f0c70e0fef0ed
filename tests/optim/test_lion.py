"""zero_ext.Lion by itself against float64, on shards against itself, and on bad input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_ext


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
