"""The values of released parameters for whoever uses them outside the engine's hooks, and writes to them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import nn

from zero_ext.comm import Collectives
from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.zero.memory.pool import BufferPool
from zero_ext.zero.units.collective_errors import refuse_different_writes
from zero_ext.zero.units.dtensor_local import like_parameter, local_tensor
from zero_ext.zero.units.master_weights import MasterShard, store_values
from zero_ext.zero.units.parameter_marks import expert_ranks, refuse_packed
from zero_ext.zero.units.plain_torch import in_transform, plain_torch
from zero_ext.zero.units.released_params import ParameterFacts
from zero_ext.zero.units.unit import Unit
from zero_ext.zero.unshard.prefetcher import GatherOrder, Prefetcher


class UpdateGuard(Protocol):
    """The schedule of the updates, which refuses uses and writes while parameters may change."""

    in_progress: bool  # a delayed update is running
    pending: bool  # updates inside backward wait for their step

    def refuse_pending(self, what: str) -> None:
        """Raise ``RuntimeError`` while updates are ``pending``."""

    def refuse_local(self, what: str) -> None:
        """Raise ``RuntimeError`` where the next step leaves gradients unreduced."""

    def refuse_drift(self, what: str) -> None:
        """Raise ``RuntimeError`` while the ranks' parameters differ between 1-bit exchanges."""


class ShardedState(Protocol):
    """The part of an engine that on-demand access needs."""

    index: dict[nn.Parameter, tuple[Unit, int]]
    masters: tuple[MasterShard, ...]
    collectives: Collectives
    pool: BufferPool
    prefetcher: Prefetcher

    @property
    def updates(self) -> UpdateGuard:
        """The schedule of its updates."""

    @property
    def in_use(self) -> bool:
        """Return whether a forward or a backward pass is running."""

    def parameter_read(self, parameter: nn.Parameter) -> None:
        """Note that the model's code reads ``parameter``."""

    def finish_updates(self) -> None:
        """Finish a delayed update; a collective."""


class OnDemandAccess:
    """Reads and writes full values of an engine's released parameters, one unit gathered at a time. Every
    read and write is a collective: all ranks use the same parameters in the same order, else an error names
    the unit. The engine is held weakly."""

    def __init__(self, engine: ShardedState) -> None:
        self._engine = weakref.ref(engine)

    def __deepcopy__(self, memo: dict[int, object]) -> OnDemandAccess:
        return self

    def facts(self, parameter: nn.Parameter) -> ParameterFacts:
        unit, number = self._alive().index[parameter]
        spec = unit.layout.specs[number]
        return ParameterFacts(spec.name, spec.stride, unit.generation(number))

    def read(self, parameter: nn.Parameter) -> torch.Tensor:
        engine = self._alive()
        unit, number = engine.index[parameter]
        name = unit.layout.specs[number].name
        if in_transform():
            raise RuntimeError(transform_refusal(name))
        refuse_packed(parameter, name)
        engine.updates.refuse_pending(f"a use of parameter '{name}'")
        engine.parameter_read(parameter)
        with plain_torch(), held(engine, [unit]):
            # A copy, because the unit is released here and its memory gets other contents.
            return like_parameter(parameter, unit.view_of(number).clone())

    def write(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        engine = self._alive()
        unit, number = engine.index[parameter]
        name = unit.layout.specs[number].name
        engine.updates.refuse_pending(f"a write to parameter '{name}'")
        if engine.in_use and engine.updates.in_progress:
            raise RuntimeError(_update_refusal(name))
        with plain_torch():
            if not engine.in_use:
                engine.finish_updates()
            with held(engine, [unit]):
                unit.view_of(number).copy_(local_tensor(value))
                commit_writes(engine, unit, [number])

    def commit(self, unit: Unit, numbers: list[int]) -> None:
        """Make the parameters ``numbers`` of ``unit`` what a forward, or backward running it again, wrote to
        them; a collective, before the unit is released."""
        engine = self._alive()
        name = unit.layout.specs[numbers[0]].name
        engine.updates.refuse_pending(f"a write to parameter '{name}'")
        if unit.is_partial:
            unit.accept_writes()
            raise RuntimeError(
                f"parameter '{name}': expected no write in a forward while only some of its experts are "
                "gathered (units.experts is 'routed'), got one. Write inside 'with "
                "zero_ext.gathered(params, modifier_rank=0):', or set units.experts to 'all'."
            )
        if engine.updates.in_progress:
            # Although the value is lost: a graph that saved it must not find the version of the old one.
            unit.accept_writes()
            raise RuntimeError(_update_refusal(name))
        with plain_torch():
            commit_writes(engine, unit, numbers)

    def _alive(self) -> ShardedState:
        engine = self._engine()
        if engine is None:
            raise RuntimeError(
                "parameter: expected one of a model that exists, got one of a deleted model: its "
                "value is not in memory. Keep a reference to the prepared model."
            )
        return engine


def _update_refusal(name: str) -> str:
    """Return the error for a write while the thread of a delayed update changes the master weights."""
    return (
        f"parameter '{name}': expected no write in a forward while a delayed update is under "
        "way (offload.update_mode is 'delayed'), got one. Call model.finish_update() before "
        "that forward, or set offload.update_mode to 'after_backward'."
    )


def transform_refusal(name: str) -> str:
    """Return the message for a torch.func transform that meets the sharded parameter ``name``."""
    return (
        f"parameter '{name}': expected its value in memory inside a torch.func transform (grad, vmap, "
        "jacrev, ...), got a sharded one, and nothing can be gathered there. Use torch.autograd, or run the "
        "transform inside 'with zero_ext.gathered(model):'."
    )


@contextlib.contextmanager
def held(engine: ShardedState, units: Sequence[Unit]) -> Iterator[None]:
    """Gather ``units`` exactly inside; a collective. What is written in a block that raises is dropped."""
    holder, complete = object(), False
    # An order of its own: to look ahead from here would gather units that nobody asked for.
    order = GatherOrder[Unit]()
    engine.prefetcher.borrowers.add(holder)
    try:
        for unit in units:
            # Planned staging does not contain units that are held outside the order of a step.
            with engine.pool.growing():
                engine.prefetcher.need(unit, holder, order, exact=True)
        yield
        complete = True
    finally:
        engine.prefetcher.borrowers.discard(holder)
        for unit in units:
            # With another holder the unit stays gathered, and may contain writes of
            # a forward that are still to be committed.
            if not complete and unit.holders == {holder}:
                unit.accept_writes()
            engine.prefetcher.release(unit, holder)


def commit_writes(engine: ShardedState, unit: Unit, numbers: Iterable[int]) -> None:
    """Make what was written to the gathered parameters ``numbers`` of ``unit`` the value of the shards and of
    the master weights; a collective. ``RuntimeError``: the ranks wrote different values (on all ranks;
    nothing changes), or the unit cannot be written to now."""
    if not unit.placement.params:
        raise zero_ext_bug(f"{unit.describe()}: writes to replicated parameters are followed by the step")
    try:
        # All parameters are compared before the first is stored: if ranks differ, nothing changes.
        for number in numbers:
            spec, begin = unit.layout.specs[number], unit.layout.offsets[number]
            everyone = engine.collectives.holders(bool(expert_ranks(unit.parameters[number])))
            refuse_different_writes(everyone, spec.name, unit.flat[begin : begin + spec.numel])
        engine.updates.refuse_drift(f"a write to parameters of {unit.describe()}")
        store_values(unit, engine.masters, engine.collectives)
    finally:
        unit.accept_writes()
