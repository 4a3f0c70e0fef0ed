"""Backward passes of the engine that autograd does not begin: layer by layer, and with assigned gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TypeVar

from torch import nn

from zero_ext.zero.engine import Engine
from zero_ext.zero.units.unit import Unit
from zero_ext.zero.unshard.prefetcher import GatherOrder

Result = TypeVar("Result")


@contextlib.contextmanager
def present(engine: Engine, units: Iterable[Unit], order: GatherOrder) -> Iterator[None]:
    """Inside, ``units`` are gathered once, whatever runs; what comes next in ``order`` is on its way."""
    holder, held = object(), list(units)
    try:
        for unit in held:
            engine.prefetcher.need(unit, holder, order)
        yield
    finally:
        for unit in held:
            engine.prefetcher.release(unit, holder)


class LayerPasses:
    """One backward pass of ``engine`` through layers that need the units ``layers``, from the last to the
    first: gradients of ``micro_batches`` add up, and each unit is reduced once, after the last layer that has
    it."""

    def __init__(self, engine: Engine, layers: Sequence[Collection[Unit]], micro_batches: int) -> None:
        self._engine, self._layers, self._micro_batches = engine, layers, micro_batches

    @contextlib.contextmanager
    def all_layers(self) -> Iterator[None]:
        """Around all layers; a collective. Ends the micro-batches of a step."""
        engine = self._engine
        with engine.collector.scaled_pass(True, self._micro_batches), engine.backward_pass.by_hand():
            self._begin(engine.units)
            yield

    @contextlib.contextmanager
    def layer(self, number: int) -> Iterator[None]:
        """Around autograd's passes through one layer."""
        engine, units = self._engine, self._layers[number]
        with present(engine, units, engine.prefetcher.backward_order), engine.collector.no_sync():
            yield
        below = set().union(*self._layers[:number])
        self._begin(unit for unit in units if unit in below)
        for unit in units:
            if unit not in below:
                engine.collector.passed(unit)

    def _begin(self, units: Iterable[Unit]) -> None:
        """No gradient of ``units`` is the last one yet."""
        wanted = set(units)
        for gradients in self._engine.reducer.gradients:
            if gradients.unit in wanted:
                gradients.begin_pass(unreduced=self._micro_batches > 1)


def adopt_assigned(
    engine: Engine, parameters: Sequence[nn.Parameter], compute: Callable[[], Result]
) -> Result:
    """Return the result of ``compute``, which sets ``parameter.grad`` of some of ``parameters`` rather than
    have autograd bring it; a backward pass of its own, in which all of them are present."""
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
