"""Reductions and aborts over the model-parallel ranks in a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from zero_ext.comm import Collectives


def sum_over_model(model: Collectives | None, values: torch.Tensor, label: str) -> torch.Tensor:
    """Sum ``values``, integers, in place over the ranks of ``model``, and return them."""
    return values if model is None else model.sum_(values, label)


def largest_over_model(model: Collectives | None, value: float, label: str) -> float:
    """Return the largest ``value`` of the ranks of ``model``, NaN if there is one."""
    if model is None:
        return value
    table = torch.zeros(model.world_size, dtype=torch.float64, device="cpu")
    table[model.rank] = value
    return float(model.sum_(table, label).amax())


@contextlib.contextmanager
def abort_model_parallel_on_error(model: Collectives | None) -> Iterator[None]:
    """Return a context for a step that aborts the other ranks of ``model`` if this one raises.

    They would wait for it until their timeout. A ``FloatingPointError`` is raised on all of them anyway.
    """
    try:
        yield
    except FloatingPointError:
        raise
    except Exception as error:
        if model is not None:
            model.abort(f"rank {model.rank} of those with the parts of the model stopped in a step: {error}")
        raise
