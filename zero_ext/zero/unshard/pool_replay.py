"""Replay of a step with units that have sizes only: which are gathered when, and what the pool has to hold.

The engine's prefetcher gathers and releases in it. What ``accumulator.py`` and ``reducer.py`` do is repeated,
for a model that uses its parameters in the order of their registration, block by block. Inside a block
gradients may come in any order. Memory plans and simulated steps use it, so it imports no torch.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from zero_ext.config import UnitConfig, ZeroConfig
from zero_ext.config.buffer_sizes import (
    BYTES_OF_DTYPE,
    GRADIENT_CHUNK_ELEMENTS,
    READS_AHEAD,
    REDUCTIONS_IN_FLIGHT,
    SHARD_TRANSFERS_IN_FLIGHT,
    WRITES_BEHIND,
)
from zero_ext.config.events import Bus
from zero_ext.config.tiers import is_stored
from zero_ext.zero.memory.gathered_unit import ExpertSelection, GatheredUnit, UnitSpec, UnitState
from zero_ext.zero.memory.pool_plan import Demand, Key, Purpose
from zero_ext.zero.unshard.prefetcher import Prefetcher

P = TypeVar("P", bound="PlannedUnit")


class PlannedUnit(GatheredUnit):
    """A unit that only changes its state; subclasses note what each transition costs."""

    def __init__(self, spec: UnitSpec) -> None:
        self.spec = spec
        self.state = UnitState.RELEASED
        self.holders: set[object] = set()
        self.exact = True
        self._is_aside = False

    @property
    def is_aside(self) -> bool:
        """Return whether :meth:`set_aside` has been called last."""
        return self._is_aside

    @property
    def needs_early_gather(self) -> bool:
        """Return whether other ranks have shards of it."""
        return self.spec.world_size > 1

    def to_fetching(self, exact: bool = False, experts: ExpertSelection = None) -> None:
        """Start to fetch the shard."""
        self.state = UnitState.FETCHING

    def to_gathering(self) -> None:
        """Start the all-gather."""
        self.state = UnitState.GATHERING

    def to_gathered(self) -> None:
        """End the all-gather."""
        self.state, self._is_aside = UnitState.GATHERED, False

    def cover(self, experts: ExpertSelection) -> None:
        """Do nothing: no values exist."""

    def set_aside(self) -> None:
        """Keep the values for the next use."""
        self.state, self._is_aside = UnitState.GATHERING, True

    def to_released(self) -> None:
        """Drop the values."""
        self.state, self._is_aside = UnitState.RELEASED, False

    def invalidate(self) -> None:
        """Do nothing: no values exist."""

    def written(self) -> list[int]:
        """Return nothing: no values exist."""
        return []

    def describe(self) -> str:
        """Return the name, for errors."""
        return f"unit '{self.spec.name}'"


class PlannedPasses(Generic[P]):
    """Forwards and backwards of a model that uses its parameters in the order of registration.

    A unit is needed while the module that has it runs, from the first to the last parameter of
    ``spec.gathered``. The prefetcher decides what is gathered besides, as in a step with a known order.
    Passes yield the number of each parameter while it is in use.
    """

    def __init__(self, units: Sequence[P], parameters: int, policy: UnitConfig) -> None:
        self._parameters = parameters
        self._prefetcher = Prefetcher(units, policy, Bus(), commit=_ignore, warn=_ignore)
        sharded = self._prefetcher.units
        # Of units that begin with the same parameter the longest belongs to the
        # outer module, which runs first.
        forward = sorted(sharded, key=lambda unit: (unit.spec.gathered[0], -unit.spec.gathered[1]))
        backward = sorted(
            (unit for unit in sharded if unit.spec.rereads),
            key=lambda unit: (-unit.spec.gathered[1], unit.spec.gathered[0]),
        )
        self._prefetcher.forward_order.expect(forward)
        self._prefetcher.backward_order.expect(backward)
        self._from_first, self._from_last = defaultdict[int, list[P]](list), defaultdict[int, list[P]](list)
        for unit in forward:
            self._from_first[unit.spec.gathered[0]].append(unit)
        for unit in backward:
            self._from_last[unit.spec.gathered[1]].append(unit)

    def forward(self, repeats: bool = False) -> Iterator[int]:
        """Run a forward; ``repeats``: another one like it follows, not backward."""
        order = self._prefetcher.forward_order
        order.begin(repeats)
        ending = defaultdict[int, list[P]](list)
        for number in range(self._parameters):
            for unit in self._from_first[number]:
                self._prefetcher.need(unit, self, order)
                ending[unit.spec.gathered[1]].append(unit)
            yield number
            for unit in reversed(ending[number]):  # the inner ones first
                self._prefetcher.release(unit, self, order)
        self._prefetcher.end_pass(order)

    def backward(self) -> Iterator[int]:
        """Run a backward, from the last parameter to the first."""
        order = self._prefetcher.backward_order
        self._prefetcher.begin_backward()
        ending = defaultdict[int, list[P]](list)
        for number in reversed(range(self._parameters)):
            for unit in self._from_last[number]:
                self._prefetcher.need(unit, self, order)
                ending[unit.spec.gathered[0]].append(unit)
            yield number
            for unit in ending[number]:
                self._prefetcher.release(unit, self)
        self._prefetcher.end_backward()

    def end(self) -> None:
        """Release everything."""
        self._prefetcher.release_all()


def _ignore(*_: object) -> None:
    """Do nothing: a planned unit is never written to, and whoever runs the step is warned."""


# Chunks of gradients on NVMe in memory at a time: read ahead for running reductions, written behind for those
# that have ended, one that is read, and one that it is added to.
_CHUNKS = READS_AHEAD * REDUCTIONS_IN_FLIGHT + WRITES_BEHIND * (SHARD_TRANSFERS_IN_FLIGHT + 1) + 2
_REDUCING: tuple[Purpose, ...] = ("received", "sent")
_ANY_CHUNKS: Key = ("", "chunks")


def demands_of_a_step(units: Sequence[UnitSpec], config: ZeroConfig, used_up: bool = False) -> list[Demand]:
    """Return the demands of one forward and backward pass on the pool.

    ``used_up``: each unit's gradient ends with its update in backward.

    - Forward, and backward in reverse: a unit is needed while the module that has it runs; ``Prefetcher``
      decides what is gathered besides.
    - Quantized parameters need a payload with all shards until they are used.
    - A sharded gradient is full from the block of the unit's last parameter to the end of its reduction.
    - A reduction needs the other ranks' shards, a copy in the communication dtype if that differs or twice
      the quantized payload, and the shard that is copied to another tier or used by an update in backward.
      Two reductions run simultaneously while further gradients are computed. Two more that have ended may
      still be written to NVMe. Where gradients add up there, chunks of them are read back.
    - Forward without autograd: after the last unit the first ones are gathered ahead, for the next call.
    """
    replay = _Replay(units, config, used_up)
    deque(replay.passes.forward(), maxlen=0)
    replay.backward()
    deque(replay.passes.forward(repeats=True), maxlen=0)
    return replay.demands()


def gathered_once(units: Sequence[UnitSpec], config: ZeroConfig) -> list[UnitSpec]:
    """Return the sharded units that a step gathers for forward alone, as backward reuses or needs none."""
    replay = _Replay(units, config, used_up=False)
    deque(replay.passes.forward(), maxlen=0)
    return [
        unit.spec for unit in replay.sharded if not (unit.spec.rereads and unit.state is UnitState.RELEASED)
    ]


class _ReplayedUnit(PlannedUnit):
    def __init__(self, spec: UnitSpec, replay: _Replay) -> None:
        super().__init__(spec)
        self._replay = replay

    def to_fetching(self, exact: bool = False, experts: ExpertSelection = None) -> None:
        super().to_fetching(exact, experts)
        self._replay.acquire(self.spec.name, "parameters", self.spec.nbytes)

    def to_gathering(self) -> None:
        super().to_gathering()
        codes = self._replay.config.communication.quantized_weights
        if codes is not None and self.spec.is_float and self.spec.world_size > 1:
            self._replay.acquire(self.spec.name, "payload", self.spec.payload_bytes(codes))

    def to_gathered(self) -> None:
        super().to_gathered()
        self._replay.free(self.spec.name, "payload")

    def to_released(self) -> None:
        super().to_released()
        self._replay.free(self.spec.name, "parameters", "payload")


class _Replay:
    def __init__(self, units: Sequence[UnitSpec], config: ZeroConfig, used_up: bool) -> None:
        self._units, self.config = units, config
        self.sharded = [_ReplayedUnit(unit, self) for unit in units if unit.placement.params]
        parameters = 1 + max((unit.gathered[1] for unit in units), default=-1)
        self.passes = PlannedPasses(self.sharded, parameters, config.units)
        self._accumulates = config.batch.gradient_accumulation_steps > 1
        self._sum_bytes = BYTES_OF_DTYPE[config.precision.grad_accum_dtype]
        sent = config.precision.communication_dtype
        self._used_up = used_up
        self._sent_bytes = BYTES_OF_DTYPE[sent] if sent is not None else None
        self._flying: deque[UnitSpec] = deque()
        self._moving: deque[UnitSpec] = deque()
        self._now = 0
        self._open: dict[Key, int] = {}
        self._nbytes: dict[Key, int] = {}
        self._when: dict[Key, list[tuple[int, int]]] = defaultdict(list)

    def demands(self) -> list[Demand]:
        """Return the demands replayed so far, after which nothing stays gathered."""
        self.passes.end()
        return [
            Demand(key, self._nbytes[key], tuple(when), _CHUNKS if key == _ANY_CHUNKS else 1)
            for key, when in self._when.items()
        ]

    def backward(self) -> None:
        """Replay backward with its gradients: parameter after parameter, from the last one on."""
        grads_start, early, complete = defaultdict(list), defaultdict(list), defaultdict(list)
        for unit in self._units:
            if unit.grads_end is not None:
                first, last = unit.grads_end
                if unit.placement.grads:
                    grads_start[unit.grads_start].append(unit)
                complete[first].append(unit)
                # Units of one block may complete in any order. A reduction may begin at the last parameter of
                # the block, which backward reaches first, so its scratch memory counts from there.
                if any(unit.grads_end == other.grads_end for other in self._units if other is not unit) or (
                    unit.grads_end != unit.gathered
                ):
                    early[last].append(unit)
        for number in self.passes.backward():
            for unit in grads_start[number]:
                self.acquire(unit.name, "gradient", unit.nbytes)
            for unit in early[number]:
                self._acquire_scratch(unit)
            for unit in reversed(complete[number]):
                self._reduce(unit)
        while self._flying:
            self._finish_oldest()
        while self._moving:
            self._end_transfer()
        self.free(*_ANY_CHUNKS)

    def _reduce(self, unit: UnitSpec) -> None:
        while len(self._flying) >= REDUCTIONS_IN_FLIGHT:
            self._finish_oldest()
        self._flying.append(unit)
        self._acquire_scratch(unit)
        if unit.world_size == 1:
            self._finish_oldest()

    def _acquire_scratch(self, unit: UnitSpec) -> None:
        """Acquire what a reduction needs, unless the unit has it already."""
        placement = unit.placement
        if self._accumulates and is_stored(placement.grads_tier):
            size = max(self._sum_bytes, unit.itemsize)
            self.acquire(*_ANY_CHUNKS, min(GRADIENT_CHUNK_ELEMENTS, unit.shard_numel) * size)
        if unit.world_size == 1 or any((unit.name, purpose) in self._open for purpose in _REDUCING):
            return
        own = self._sum_bytes if self._accumulates else unit.itemsize
        local = unit.itemsize if placement.grads else own
        sent = local if self._sent_bytes is None else self._sent_bytes
        if placement.grads and (placement.grads_tier != "device" or self._used_up):
            self.acquire(unit.name, "staging", unit.shard_numel * own)
        codes = self.config.communication.quantized_gradients
        if codes is not None and placement.grads:
            self.acquire(unit.name, "sent", unit.payload_bytes(codes))
            self.acquire(unit.name, "received", unit.payload_bytes(codes))
            return
        reduction = self.config.precision.reduction if unit.replicas == 1 else "rank_order"
        if sent != local or reduction == "node_order":
            self.acquire(unit.name, "sent", unit.numel * sent)
        # NodeOrderedReduceScatter receives into the gradient itself if that is wide enough.
        if reduction == "node_order":
            received = unit.numel * sent if sent > local else 0
        elif reduction == "backend":
            received = unit.shard_numel * sent
        else:
            received = unit.shard_numel * (max(unit.world_size, unit.replicas) - 1) * sent
        if received:
            self.acquire(unit.name, "received", received)

    def _finish_oldest(self) -> None:
        unit = self._flying.popleft()
        self.free(unit.name, "received", "sent")
        self._moving.append(unit)
        stored = is_stored(unit.placement.grads_tier)
        if unit.world_size > 1 or not stored:
            self.free(unit.name, "gradient")
        if not stored:
            self.free(unit.name, "staging")
        while len(self._moving) > SHARD_TRANSFERS_IN_FLIGHT:
            self._end_transfer()

    def _end_transfer(self) -> None:
        self.free(self._moving.popleft().name, "staging", "gradient")

    def acquire(self, name: str, purpose: Purpose, nbytes: int) -> None:
        """Note that a unit needs bytes for a purpose from now on, unless it has them."""
        key = name, purpose
        self._nbytes[key] = max(nbytes, self._nbytes.get(key, 0))
        self._open.setdefault(key, self._now)
        self._now += 1

    def free(self, name: str, *purposes: Purpose) -> None:
        """Note the end of such needs, where there are any."""
        for purpose in purposes:
            begin = self._open.pop((name, purpose), None)
            if begin is not None:
                self._when[name, purpose].append((begin, self._now))
                self._now += 1
