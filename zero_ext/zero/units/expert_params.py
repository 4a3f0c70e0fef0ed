"""Marks of parameters that belong to experts, of which the data-parallel ranks have different ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

_SPREAD = "_zero_ext_expert_ranks"


def mark_expert(parameter: nn.Parameter, ranks: Sequence[int]) -> None:
    """Declares, before :func:`zero_ext.prepare`, that ``parameter`` belongs to an expert: the experts are
    spread over ``ranks`` (of the world), each of which has others, all of the same shapes."""
    setattr(parameter, _SPREAD, tuple(ranks))


def expert_ranks(parameter: nn.Parameter) -> tuple[int, ...]:
    """The ranks given to :func:`mark_expert`; none for a parameter that every data-parallel rank has."""
    found: tuple[int, ...] = getattr(parameter, _SPREAD, ())
    return found


def mean_over_senders(parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    """``gradient`` as autograd brings it; of an expert's parameter, where it is the sum of what the losses of
    all ranks say that send samples here, their mean."""
    senders = len(expert_ranks(parameter))
    return gradient / senders if senders else gradient
