"""A backward pass of the engine that is made of several of autograd's, one layer after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence

from zero_ext.zero.engine import Engine
from zero_ext.zero.units.unit import Unit
from zero_ext.zero.unshard.prefetcher import GatherOrder


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
