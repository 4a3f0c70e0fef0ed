"""What the ranks that hold the parts of one model have to agree on in a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from zero_ext.comm import Collectives


def sum_over_model(model: Collectives | None, values: torch.Tensor, label: str) -> torch.Tensor:
    """``values``, whole numbers, summed in place over the ranks of ``model``; returns them."""
    return values if model is None else model.sum_(values, label)


def largest_over_model(model: Collectives | None, value: float, label: str) -> float:
    """The largest ``value`` of the ranks of ``model``, NaN if there is one."""
    if model is None:
        return value
    table = torch.zeros(model.world_size, dtype=torch.float64, device="cpu")
    table[model.rank] = value
    return float(model.sum_(table, label).amax())


@contextlib.contextmanager
def abort_model_parallel_on_error(model: Collectives | None) -> Iterator[None]:
    """Around a step of this rank's part: an error of its own ends it on the ranks of ``model`` too, which
    would wait for this one until their time-out. A ``FloatingPointError`` has come to all of them."""
    try:
        yield
    except FloatingPointError:
        raise
    except Exception as error:
        if model is not None:
            model.abort(f"rank {model.rank} of those with the parts of the model stopped in a step: {error}")
        raise
