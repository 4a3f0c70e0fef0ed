"""zero_ext.Lamb by itself against float64, on shards against itself, and on bad input."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import zero_ext
from tests.optim.reference_lamb import ReferenceLamb


def make_groups(weights: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": weights[:1], "betas": (0.5, 0.8), "weight_decay": 0.0},
        {"params": weights[1:2], "lr": torch.tensor(0.5), "min_coeff": 0.1, "max_coeff": 0.5},
        {"params": weights[2:], "min_coeff": 1.0, "max_coeff": 1.0},  # left out of the adaptation
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"bias_correction": False, "maximize": True},
        {"eps_inside_sqrt": True, "eps": 0.1},
        {"min_coeff": 2.0},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_follows_the_paper(dtype: torch.dtype, settings: dict[str, Any], generator: torch.Generator) -> None:
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in ((7, 13), (5,), (3, 2))]
    values[0] = values[0].t()  # not contiguous
    weights, exact = ([nn.Parameter(value.to(kind)) for value in values] for kind in (dtype, torch.float64))
    settings = {"lr": 0.25, "weight_decay": 0.125, "eps": 1e-3, **settings}
    optimizer = zero_ext.Lamb(make_groups(weights), **settings)
    reference = ReferenceLamb(make_groups(exact), **settings)
    for _ in range(4):
        for weight, wanted in zip(weights, exact, strict=True):
            weight.grad = torch.randn(weight.shape, generator=generator).to(dtype)
            wanted.grad = weight.grad.double()
        optimizer.step()
        reference.step()
        for weight, wanted in zip(weights, exact, strict=True):
            torch.testing.assert_close(weight.double(), wanted, rtol=2e-2, atol=1e-5)
            if dtype == torch.float32:
                torch.testing.assert_close(weight.double(), wanted, rtol=1e-5, atol=1e-6)
            wanted.data.copy_(weight.data)  # what the parameters' own precision makes of it
            for moment in ("exp_avg", "exp_avg_sq"):
                stored = optimizer.state[weight][moment]
                assert stored.dtype == torch.float32 and stored.shape == weight.shape
                torch.testing.assert_close(
                    stored.double(), reference.state[wanted][moment], rtol=1e-5, atol=1e-6
                )


def test_ratios_of_what_is_zero() -> None:
    """1, whatever the coefficients, as in DeepSpeed: new weights would never leave zero."""
    fresh, still = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.full((4,), 3.0))
    optimizer = zero_ext.Lamb([fresh, still], lr=0.5, min_coeff=0.01, max_coeff=0.1, eps=0.0)
    fresh.grad, still.grad = torch.tensor([1.0, -2.0, 3.0, -4.0]), torch.zeros(4)
    optimizer.param_groups[0]["eps"] = 1e-8
    optimizer.step()
    torch.testing.assert_close(fresh.detach(), torch.tensor([-0.5, 0.5, -0.5, 0.5]))
    assert torch.equal(still.detach(), torch.full((4,), 3.0))


def test_a_gradient_that_is_not_finite_shows_in_its_own_parameter() -> None:
    bad, good = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    bad.grad, good.grad = torch.tensor([1.0, float("inf"), 1.0, 1.0]), torch.ones(4)
    zero_ext.Lamb([bad, good]).step()
    assert bad.isnan().all() and good.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_state_survives_saving_and_unused_parameters_stay(dtype: torch.dtype) -> None:
    """torch casts the moments that it loads to the parameter's dtype."""
    used, unused = nn.Parameter(torch.ones(3, dtype=dtype)), nn.Parameter(torch.ones(3, dtype=dtype))
    first = zero_ext.Lamb([used, unused], lr=0.1)
    used.grad = torch.tensor([1.0, -1.0, 0.5], dtype=dtype)
    assert first.step(lambda: 7) == 7
    assert torch.equal(unused, torch.ones_like(unused)) and not first.state[unused]
    copied = nn.Parameter(used.detach().clone())
    second = zero_ext.Lamb([copied, unused])
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert second.state[copied]["step"] == 1 and second.state[copied]["exp_avg"].dtype == dtype
    copied.grad = used.grad = torch.tensor([-0.01, 0.01, -3.0], dtype=dtype)
    first.step()
    second.step()
    torch.testing.assert_close(copied, used, rtol=2e-2 if dtype != torch.float32 else 0, atol=0)
    assert second.state[copied]["step"] == 2 and not torch.equal(used, torch.ones_like(used))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr: expected .*, got -1.0"),
        ({"lr": float("nan")}, "lr: expected .*, got nan"),
        ({"betas": (0.9, 1.0)}, r"betas: expected two numbers in \[0, 1\), got \(0.9, 1.0\)"),
        ({"eps": -1e-8}, "eps: expected .*, got -1e-08"),
        ({"weight_decay": float("inf")}, "weight_decay: expected .*, got inf"),
        ({"max_coeff": float("nan")}, "max_coeff: expected .*, got nan"),
        ({"min_coeff": 11.0}, r"min_coeff: expected at most max_coeff \(10.0\), got 11.0"),
    ],
)
def test_refuses_hyper_parameters_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zero_ext.Lamb([nn.Parameter(torch.ones(1))], **settings)
    with pytest.raises(ValueError, match=message):
        zero_ext.Lamb([{"params": [nn.Parameter(torch.ones(1))], **settings}])


def test_refuses_what_it_cannot_step() -> None:
    double = nn.Parameter(torch.ones(2, dtype=torch.float64))
    double.grad = torch.ones(2, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"param group 0, parameter 0: expected float32.*, got torch.float64"):
        zero_ext.Lamb([double]).step()
    sparse, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    sparse.grad, other.grad = torch.ones(2).to_sparse(), torch.ones(2)
    with pytest.raises(RuntimeError, match="parameter 1: expected a dense gradient, got a sparse one"):
        zero_ext.Lamb([other, sparse]).step()
    assert torch.equal(other, torch.ones(2))
