"""What the ranks that hold the parts of one model have to agree on in a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from zero_ext.comm import Collectives
from zero_ext.zero.construction.grouping import Owned
from zero_ext.zero.units.dtensor_local import is_split
from zero_ext.zero.units.shared_params import tie_of


def counted_once(owned: Sequence[Owned], model: Collectives | None, tensor_rank: int) -> list[Owned]:
    """``owned`` with a mark on the parameters that another rank of ``model`` has too and counts: tied ones on
    all but the first of their ranks, and what is not split over the ranks that split tensors on all but their
    first."""
    if model is None:
        return list(owned)
    found = []
    for item in owned:
        tie = tie_of(item.parameter)
        first = tie is None or tie.ranks[0] == model.rank
        here = tensor_rank == 0 or is_split(item.parameter)
        found.append(replace(item, counted=first and here))
    return found


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
def together_in_model(model: Collectives | None) -> Iterator[None]:
    """Around a step of this rank's part: an error of its own ends it on the ranks of ``model`` too, which
    would wait for this one until their time-out. A ``FloatingPointError`` has come to all of them."""
    try:
        yield
    except FloatingPointError:
        raise
    except Exception as error:
        if model is not None:
            model.give_up(
                f"rank {model.rank} of those with the parts of the model stopped in a step: {error}"
            )
        raise
