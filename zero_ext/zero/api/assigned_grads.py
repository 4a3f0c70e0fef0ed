"""Gradients that are assigned to ``parameter.grad``, as by a pass that makes those of weights alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import nn

from zero_ext.zero.engine import Engine

Result = TypeVar("Result")


def adopt_assigned(
    engine: Engine, parameters: Sequence[nn.Parameter], compute: Callable[[], Result]
) -> Result:
    """Return the result of ``compute``, which sets ``parameter.grad`` of some of ``parameters`` rather than
    have autograd bring it; a backward pass of its own, in which all of them are present.
    """
    holder = object()
    units = list(dict.fromkeys(engine.index[parameter][0] for parameter in parameters))
    with engine.backward_pass.by_hand():
        # Nothing releases these units here. The end of the pass releases all units.
        for unit in units:
            engine.prefetcher.need(unit, holder, engine.prefetcher.backward_order)
        for parameter in parameters:
            parameter.grad = None
        result = compute()
        for parameter in parameters:
            if parameter.grad is not None:
                engine.collector.collect(parameter)
    return result
