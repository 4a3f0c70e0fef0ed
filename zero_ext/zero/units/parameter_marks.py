"""Marks on parameters, set before prepare: experts spread over ranks, and parameters tied between ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

_EXPERT = "_zero_ext_expert_ranks"
_TIED = "_zero_ext_tie"


def mark_expert(parameter: nn.Parameter, ranks: Sequence[int]) -> None:
    """Mark ``parameter`` as an expert's, before :func:`zero_ext.prepare`.

    The experts are spread over ``ranks`` (of the world). Each of these has other experts of the same shapes.
    """
    setattr(parameter, _EXPERT, tuple(ranks))


def expert_ranks(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the ranks of :func:`mark_expert`, none for a parameter that every data-parallel rank has."""
    found: tuple[int, ...] = getattr(parameter, _EXPERT, ())
    return found


def mean_over_senders(parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    """Return ``gradient`` as autograd computes it, divided by the number of ranks for an expert's parameter.

    An expert's gradient is the sum over the losses of all ranks that send samples to it.
    """
    senders = len(expert_ranks(parameter))
    return gradient / senders if senders else gradient


@dataclass(frozen=True)
class Tie:
    """``name`` of a parameter that is the same on ``ranks``, counted within the model-parallel group."""

    name: str
    ranks: tuple[int, ...]


def mark_tied(parameter: nn.Parameter, name: str, ranks: Sequence[int]) -> None:
    """Mark ``parameter`` as one that ``ranks`` of the model-parallel group have, with the same values.

    Call it before :func:`zero_ext.prepare`.
    """
    setattr(parameter, _TIED, Tie(name, tuple(ranks)))


def tie_of(parameter: nn.Parameter) -> Tie | None:
    """Return the mark that :func:`mark_tied` set."""
    found: Tie | None = getattr(parameter, _TIED, None)
    return found


def shared_names(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    return [each for each in names.values() if len(each) > 1]
