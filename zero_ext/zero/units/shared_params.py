"""Marks of parameters that several ranks of one model have."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

_TIE = "_zero_ext_tie"


@dataclass(frozen=True)
class Tie:
    """``name`` of a parameter that is the same on ``ranks``, those of the ranks with the model's parts."""

    name: str
    ranks: tuple[int, ...]


def tie(parameter: nn.Parameter, name: str, ranks: Sequence[int]) -> None:
    """Declares, before :func:`zero_ext.prepare`, that ``ranks`` of those with the model's parts have
    ``parameter`` too, with the same values."""
    setattr(parameter, _TIE, Tie(name, tuple(ranks)))


def tie_of(parameter: nn.Parameter) -> Tie | None:
    """What :func:`tie` declared of ``parameter``."""
    found: Tie | None = getattr(parameter, _TIE, None)
    return found


def shared_names(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    return [each for each in names.values() if len(each) > 1]
