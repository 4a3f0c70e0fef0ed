"""The softmax of rows of logits against float64, and what its ops refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.helpers import FLOAT_DTYPES
from zero_ext import ops

NEAR = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    torch.bfloat16: {"rtol": 8e-3, "atol": 1e-6},
    torch.float16: {"rtol": 1e-3, "atol": 1e-6},
}


def exact(logits: Tensor, softcap: float) -> Tensor:
    wide = logits.double()
    return softcap * (wide / softcap).tanh() if softcap else wide


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("words", [1, 37, 5000])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_a_cross_entropy_and_its_gradient_in_float64(
    dtype: torch.dtype, words: int, softcap: float, threads: int, isa: str, generator: torch.Generator
) -> None:
    logits = (3 * torch.randn(19, words, generator=generator)).to(dtype)
    labels = torch.randint(words, (19,), generator=generator)
    wide = exact(logits, softcap).requires_grad_()
    wanted = torch.nn.functional.cross_entropy(wide, labels, reduction="none", label_smoothing=0.1)
    wanted.sum().backward()
    slope = 1 - (wide.detach() / softcap).square() if softcap else 1

    largest = exact(logits, softcap).amax(-1).float()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    sums = ops.softmax_sums(logits, labels, largest[None], softcap)
    found = sums[0].log() - 0.9 * sums[1] - 0.1 / words * sums[2]
    ones = torch.ones(19)
    coefficients = torch.stack([largest, 1 / sums[0], 0.1 / words * ones, 0.9 * ones])
    ops.softmax_gradient_(logits, labels, coefficients, softcap)
    torch.set_num_threads(before)
    torch.testing.assert_close(found.double(), wanted.detach(), rtol=1e-5, atol=2e-6)
    assert wide.grad is not None
    torch.testing.assert_close(logits.double(), wide.grad * slope, **NEAR[dtype])


@pytest.mark.parametrize("words", [37, 5000])
def test_a_label_of_another_slice_has_no_logit(words: int, isa: str, generator: torch.Generator) -> None:
    logits = torch.randn(4, words, generator=generator)
    labels, zeros = torch.tensor([-100, words, -1, 2]), torch.zeros(4)
    sums = ops.softmax_sums(logits, labels, zeros[None], 0.0)
    assert torch.equal(sums[1], torch.stack([zeros[0], zeros[0], zeros[0], logits[3, 2]]))
    gradient = logits.clone()
    ops.softmax_gradient_(gradient, labels, torch.stack([zeros, zeros, zeros, torch.ones(4)]), 0.0)
    wanted = torch.zeros(4, words)
    wanted[3, 2] = -1
    assert torch.equal(gradient, wanted)


LOGITS, LABELS = torch.zeros(3, 7), torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"logits": torch.zeros(21)}, r"argument 'logits': expected shape \[tokens, words\], got \[21\]"),
        ({"logits": LOGITS.double()}, "argument 'logits'"),
        ({"logits": torch.zeros(7, 3).T}, "argument 'logits'"),
        ({"labels": LABELS.int()}, "argument 'labels'"),
        ({"labels": LABELS[:2]}, "argument 'labels'"),
        (
            {"rows": torch.zeros(5, 3)},
            r"argument '(largest|coefficients)': expected shape \[[14], 3\], got \[5, 3\]",
        ),
        ({"rows": torch.zeros(3)}, r"argument '(largest|coefficients)': expected shape .*, got \[3\]"),
        ({"rows": "double"}, "argument '(largest|coefficients)'"),
        ({"softcap": -1.0}, "'softcap': expected a finite number of at least 0, got -1"),
        ({"softcap": float("nan")}, "'softcap': expected a finite number of at least 0"),
    ],
)
@pytest.mark.parametrize(("name", "count"), [("softmax_sums", 1), ("softmax_gradient_", 4)])
def test_refusals(name: str, count: int, changed: dict[str, Any], problem: str) -> None:
    rows = torch.zeros(count, 3)
    arguments: dict[str, Any] = {"logits": LOGITS, "labels": LABELS, "rows": rows, "softcap": 0.0} | changed
    if isinstance(arguments["rows"], str):
        arguments["rows"] = rows.double()
    before = arguments["logits"].clone()
    with pytest.raises(RuntimeError, match=problem):
        getattr(ops, name)(*arguments.values())
    assert torch.equal(arguments["logits"], before)
