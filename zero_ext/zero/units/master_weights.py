"""Master weights: the fp32 values that the optimizer updates, for the elements this rank owns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from zero_ext.comm import Collectives
from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.config.tiers import is_stored
from zero_ext.offload import MASTER, ShardStorage, TierManager, Values, put, replace, subrange_of
from zero_ext.optim import OwnedRange, Segment
from zero_ext.optim.stepper import ElementRanges, segments_to_step
from zero_ext.zero.units.collective_errors import DeferredError, raise_on_all_ranks
from zero_ext.zero.units.flat_layout import ParameterSpec
from zero_ext.zero.units.parameter_marks import expert_ranks
from zero_ext.zero.units.unit import Unit

# Several chunks of the state per transfer, so that those from and to NVMe are long ones.
_CHUNK_ELEMENTS = 4 << 20
_MIXED = "Its values are now a mixture of before and after. Load the last checkpoint before going on."
_REPEAT = "No step was made. Repeat it, or load the last checkpoint."


class MasterShard(OwnedRange):
    """The optimizer's view of a unit: of its shard, or of all of it where the optimizer is replicated.

    ``state`` [owned] holds the fp32 master weights and, once an optimizer added them, its moments. If the
    unit computes in fp32 in the same memory, the masters are the parameters themselves and ``params`` is
    None; otherwise ``params`` [owned] is where the parameters, in compute precision, follow them.

    A step writes the parameters to ``output``. That is ``params`` unless updates overlap with forward and
    backward. Then the masters never share memory with the parameters, and :meth:`publish` updates these from
    the masters, or from host memory [owned] in compute precision if the masters are on NVMe.

    ``owned`` has the segments of all parameters with elements here, by name. ``segments`` are those of
    the parameters in the optimizer's groups.
    """

    def __init__(self, unit: Unit, tiers: TierManager) -> None:
        layout, placement = unit.layout, unit.placement
        self.unit = unit
        self.begin, self.end = (
            layout.shard_range(unit.collectives.rank) if placement.optimizer else (0, layout.numel)
        )
        live: ShardStorage = unit.storage if placement.optimizer else tiers.wrap_memory(unit.flat)
        shares = layout.dtype == torch.float32 and not tiers.separate_masters
        shared = live.memory(live.tier) if shares and live.tier == placement.optimizer_tier else None
        self.separate = shared is None
        state = tiers.allocate_optimizer_state(
            placement.optimizer_tier, self.end - self.begin, shared, unit.spec.rule
        )
        self.params = output = live if self.separate else None
        if tiers.delays_updates:
            stored = is_stored(state.tier)
            output = tiers.allocate_shard("host", live.numel, live.dtype) if stored else None
        super().__init__(state, output)
        self._staging = tiers.staging
        self.owned = {segment.name: segment for segment in layout.segments(self.begin, self.end)}

    def set_groups(
        self,
        group_of: Mapping[nn.Parameter, int],
        shape_of: Callable[[nn.Parameter, ParameterSpec], tuple[int, ...]],
    ) -> None:
        """Set ``segments`` to those of the parameters in ``group_of``, which maps them to param groups.
        ``shape_of`` returns the shape of the full tensor that a parameter is a slice of."""
        self.segments = tuple(
            dataclasses.replace(
                self.owned.get(spec.name, Segment(spec.name, 0, 0, 0)),
                group=group_of[parameter],
                shape=shape_of(parameter, spec),
                stride=spec.stride,
            )
            for spec, parameter in zip(self.unit.layout.specs, self.unit.parameters, strict=True)
            if parameter in group_of
        )

    def put(self, index: int, start: int, values: torch.Tensor) -> None:
        """Copy elements of parameter ``index``, in memory order from ``start`` on, without rounding. Elements
        that this rank does not own are ignored."""
        segment = self.owned.get(self.unit.layout.specs[index].name)
        # Masters that share memory with the parameters are filled by ``Unit.put``.
        if segment is None or not self.separate:
            return
        first, last = max(start, segment.start), min(start + values.numel(), segment.start + segment.numel)
        if first < last:
            target = subrange_of(self.values_of(segment), first - segment.start, last - segment.start)
            replace(target, values[first - start : last - start].float())

    def follow_params(self) -> None:
        """Copy edited parameter values into the master weights; unedited ones keep their precision."""
        if self.params is None:
            return
        for begin, end in self.state.spans():
            with self.state.edit(MASTER, begin, end) as values:
                live = self.params.read(begin, end).to(values.device)
                # A master that still rounds to its parameter was not edited. NaN is never equal, so
                # it follows.
                edited = values.to(live.dtype) != live
                values[edited] = live[edited].float()

    def write_params(self) -> None:
        """Round the master weights into the parameters' storage."""
        if self.params is None:
            return
        own, staged = self.state.tier, is_stored(self.params.tier) and not is_stored(self.state.tier)
        if staged and self._staging.holds_outputs(own):
            self._staging.send(self.state.read(MASTER, 0, self.state.numel), self.params, own)
            return
        for begin in range(0, self.state.numel, _CHUNK_ELEMENTS):
            end = min(begin + _CHUNK_ELEMENTS, self.state.numel)
            put(self.params, begin, self.state.read(MASTER, begin, end), own)

    def publish(self, used: frozenset[str], ranges: ElementRanges | None = None) -> None:
        """Update the parameters named in ``used`` after a step that did not write them itself, and that
        stepped only these ``ranges`` if there are any."""
        if self.params is None:
            raise zero_ext_bug("parameters that are their own masters follow every step")
        if self.output is None:
            self.write_params()
            return
        owned = tuple(self.owned.values())
        stepped = [(each.begin, each.end) for each in segments_to_step(owned, used, ranges)]
        if ranges is None and stepped and len(stepped) == len(owned):
            stepped = [(0, self.params.numel)]
        for begin, end in stepped:
            put(self.params, begin, self.output.read(begin, end), "host")

    def ahead_bytes(self) -> int:
        """Return the bytes of host memory of parameters that are ahead of those in use."""
        if self.output is None or self.output is self.params:
            return 0
        return self.output.numel * self.output.dtype.itemsize

    def values_of(self, segment: Segment) -> Values:
        """Return the master weights of one parameter's owned elements, where they are stored."""
        return self.state.view(MASTER, segment.begin, segment.end)

    def allocated_bytes(self) -> int:
        """Return the bytes of master weights and moments in their tier, without shared fp32 parameters."""
        shared = 0 if self.separate else self.state.numel * 4
        return self.state.allocated_bytes() - shared


def store_values(unit: Unit, masters: Iterable[MasterShard], collectives: Collectives) -> None:
    """Make the memory of a gathered ``unit`` the value of its shards and master weights. A collective where
    these are on NVMe, which may fail on one rank alone. ``RuntimeError``: storage failed on some rank. It is
    raised on all of them."""
    own = [master for master in masters if master.unit is unit]

    def store() -> None:
        unit.store_shard()
        for master in own:
            master.follow_params()

    stored = is_stored(unit.storage.tier, *(master.state.tier for master in own))
    everyone = collectives.holders(bool(expert_ranks(unit.parameters[0])))
    raise_on_all_ranks(everyone, store, f"storing what was written to {unit.describe()}", _MIXED, stored)


def follow_writes(masters: Iterable[MasterShard], collectives: Collectives | None = None) -> None:
    """Copy what the user wrote in place to replicated parameters into the master weights. With
    ``collectives`` it is a collective where master weights are on NVMe, which may fail on one rank alone: all
    ranks raise ``RuntimeError`` then, and a later call repeats it."""
    written = [master for master in masters if not master.unit.placement.params and master.unit.written()]

    def follow() -> None:
        for master in written:
            master.follow_params()

    if collectives is not None and is_stored(*(master.state.tier for master in written)):
        raise_on_all_ranks(collectives, follow, "taking over parameters that were written to", _REPEAT)
    else:
        follow()
    for master in written:
        master.unit.accept_writes()


def write_all_params(masters: Iterable[MasterShard], units: Iterable[Unit], collectives: Collectives) -> None:
    """Round all master weights into their parameters, on all ranks; a collective. ``CollectiveError``:
    storage failed on some rank. It is raised on all of them."""
    failures = DeferredError()
    for master in masters:
        failures.attempt(master.write_params)
    failures.raise_deferred(collectives, "rounding master weights into parameters")
    for unit in units:
        pending = unit.start_publishing()
        if pending is not None:
            pending.wait()
