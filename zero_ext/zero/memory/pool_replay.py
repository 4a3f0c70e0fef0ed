"""Replay of a step that finds its demands on the pool: how many bytes each unit needs, and when.

The replay does what ``prefetcher.py``, ``accumulator.py`` and ``reducer.py`` do, for a model that uses its
parameters in the order of their registration, block by block. Inside a block gradients may come in any order.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence

from zero_ext.config import ZeroConfig
from zero_ext.config.buffer_sizes import BYTES_OF_DTYPE, GRADIENT_CHUNK_ELEMENTS
from zero_ext.config.overlap_limits import (
    READS_AHEAD,
    REDUCTIONS_IN_FLIGHT,
    SHARD_TRANSFERS_IN_FLIGHT,
    WRITES_BEHIND,
)
from zero_ext.zero.memory.lookahead import is_reused, look_ahead
from zero_ext.zero.memory.pool_plan import Demand, Key, Purpose
from zero_ext.zero.memory.unit_spec import UnitSpec

# Chunks of gradients on NVMe in memory at a time: read ahead for running reductions, written behind for those
# that have ended, one that is read, and one that it is added to.
_CHUNKS = READS_AHEAD * REDUCTIONS_IN_FLIGHT + WRITES_BEHIND * (SHARD_TRANSFERS_IN_FLIGHT + 1) + 2
_REDUCING: tuple[Purpose, ...] = ("received", "sent")
_ANY_CHUNKS: Key = ("", "chunks")


def demands_of_a_step(units: Sequence[UnitSpec], config: ZeroConfig, used_up: bool = False) -> list[Demand]:
    """Return the demands of one forward and backward pass on the pool.

    ``used_up``: each unit's gradient ends with its update in backward.

    - Forward, and backward in reverse: a unit is gathered while the module that needs it runs. The next one
      (two where shards are on NVMe) is gathered ahead, and as many more as ``units.prefetch_elements`` and
      ``units.max_live_elements`` allow. Units that backward needs first stay gathered after forward, and
      those that ``units.reuse_elements`` allows.
    - Quantized parameters need a payload with all shards until they are used.
    - A sharded gradient is full from the block of the unit's last parameter to the end of its reduction.
    - A reduction needs the other ranks' shards, a copy in the communication dtype if that differs or twice
      the quantized payload, and the shard that is copied to another tier or used by an update in backward.
      Two reductions run simultaneously while further gradients are computed. Two more that have ended may
      still be written to NVMe. Where gradients add up there, chunks of them are read back.
    - Forward without autograd: after the last unit the first ones are gathered ahead, for the next call.
    """
    replay = _Replay(units, config, used_up)
    replay.forward(repeats=False)
    replay.backward()
    replay.forward(repeats=True)
    return replay.demands()


def gathered_once(units: Sequence[UnitSpec], config: ZeroConfig) -> list[UnitSpec]:
    """Return the sharded units that a step gathers for forward alone, as backward reuses or needs none."""
    replay = _Replay(units, config, used_up=False)
    replay.forward(repeats=False)
    return [unit for unit in units if unit.placement.params and not (unit.rereads and replay.needs(unit))]


def _numel(unit: UnitSpec) -> int:
    return unit.numel


def _is_stored(unit: UnitSpec) -> bool:
    return unit.placement.params_tier == "nvme"


class _Replay:
    def __init__(self, units: Sequence[UnitSpec], config: ZeroConfig, used_up: bool) -> None:
        self._units = units
        self._sharded = [unit for unit in units if unit.placement.params]
        self._prefetch = config.units.prefetch_elements
        self._live_limit = config.units.max_live_elements
        self._reuse_limit = config.units.reuse_elements
        self._accumulates = config.batch.gradient_accumulation_steps > 1
        self._sum_bytes = BYTES_OF_DTYPE[config.precision.grad_accum_dtype]
        sent = config.precision.communication_dtype
        self._used_up = used_up
        self._sent_bytes = BYTES_OF_DTYPE[sent] if sent is not None else None
        self._communication = config.communication
        self._reduction = config.precision.reduction
        self._gathered: list[UnitSpec] = []  # or being gathered
        self._in_use: set[UnitSpec] = set()
        self._reused: set[UnitSpec] = set()  # from forward to backward, in addition to the prefetch window
        self._flying: deque[UnitSpec] = deque()
        self._moving: deque[UnitSpec] = deque()
        self._now = 0
        self._open: dict[Key, int] = {}
        self._nbytes: dict[Key, int] = {}
        self._when: dict[Key, list[tuple[int, int]]] = defaultdict(list)

    def demands(self) -> list[Demand]:
        """Return the demands replayed so far."""
        return [
            Demand(key, self._nbytes[key], tuple(when), _CHUNKS if key == _ANY_CHUNKS else 1)
            for key, when in self._when.items()
        ]

    def needs(self, unit: UnitSpec) -> bool:
        """Return whether ``unit`` is neither gathered nor being gathered."""
        return unit not in self._gathered

    def forward(self, repeats: bool) -> None:
        """Gather every unit in the order of use, and the next ones ahead: from the first again if the pass
        repeats, else on into backward."""
        order = sorted(self._sharded, key=lambda unit: (unit.gathered[0], -unit.gathered[1]))
        for index, unit in enumerate(order):
            around = order[:index] if repeats else []
            then = around if repeats else self._backward_order()
            self._leave([*order[index:], *then], until=unit.gathered[0])
            self._need(unit, [*order[index + 1 :], *around])
        self._leave([] if repeats else self._backward_order())
        wanted = {*self._window(self._backward_order()), *(() if repeats else self._reused)}
        self._release([unit for unit in self._gathered if unit not in wanted])

    def _backward_order(self) -> list[UnitSpec]:
        rereads = [unit for unit in self._sharded if unit.rereads]
        return sorted(rereads, key=lambda unit: (-unit.gathered[1], unit.gathered[0]))

    def backward(self) -> None:
        """Replay backward with its gradients: parameter after parameter, from the last one on."""
        order = self._backward_order()
        grads_start, early, complete = defaultdict(list), defaultdict(list), defaultdict(list)
        for unit in self._units:
            if unit.grads_end is not None:
                first, last = unit.grads_end
                grads_start[unit.grads_start].append(unit)
                complete[first].append(unit)
                if any(unit.grads_end == other.grads_end for other in self._units if other is not unit) or (
                    unit.grads_end != unit.gathered
                ):
                    early[last].append(unit)
        needs = deque(enumerate(order, 1))
        for number in range(max((unit.gathered[1] for unit in self._units), default=-1), -1, -1):
            while needs and needs[0][1].gathered[1] == number:
                index, unit = needs.popleft()
                self._need(unit, order[index:])
            for unit in grads_start[number]:
                if unit.placement.grads:
                    self._acquire(unit, "gradient", unit.nbytes)
            for unit in early[number]:
                self._acquire_scratch(unit)
            for unit in reversed(complete[number]):
                self._reduce(unit)
            self._release([other for other in self._gathered if other.gathered[0] == number])
        while self._flying:
            self._finish_oldest()
        while self._moving:
            self._end_transfer()
        self._close(_ANY_CHUNKS)

    def _need(self, unit: UnitSpec, upcoming: Sequence[UnitSpec]) -> None:
        self._in_use.add(unit)
        self._reused.discard(unit)
        if unit in self._gathered:
            self._free(unit, "payload")
        else:
            first, last = unit.gathered
            inner = [
                other for other in self._gathered if other.gathered[0] > first or other.gathered[1] < last
            ]
            for other in inner:
                if self._live() + unit.numel <= self._live_limit:
                    break
                self._release([other])
            self._gather(unit)
            self._free(unit, "payload")
        for later in self._window(upcoming):
            if later not in self._gathered:
                if self._live() + later.numel > self._live_limit:
                    return
                self._gather(later)

    def _window(self, upcoming: Iterable[UnitSpec]) -> Iterator[UnitSpec]:
        """Yield the units expected next that should be gathered already."""
        ahead = (unit for unit in upcoming if unit not in self._in_use and unit not in self._reused)
        return look_ahead(ahead, _numel, _is_stored, self._prefetch)

    def _leave(self, upcoming: Sequence[UnitSpec], until: int | None = None) -> None:
        """Release the units of modules before the parameter ``until``, or of all, unless needed next."""
        in_use = [unit for unit in self._gathered if unit in self._in_use]
        ended = [unit for unit in in_use if until is None or unit.gathered[1] < until]
        for unit in sorted(ended, key=lambda unit: (unit.gathered[1], -unit.gathered[0])):
            self._in_use.discard(unit)
            if next(self._window(upcoming), None) is unit:
                stays = self._live() <= self._live_limit
            elif stays := is_reused(unit, upcoming, _numel, self._reuse_limit):
                following = next((other for other in upcoming if other not in self._gathered), None)
                needed = 0 if following is None else following.numel
                stays = self._live() + needed <= self._live_limit
                if stays:
                    self._reused.add(unit)
            if not stays:
                self._release([unit])

    def _gather(self, unit: UnitSpec) -> None:
        self._gathered.append(unit)
        self._acquire(unit, "parameters", unit.nbytes)
        codes = self._communication.quantized_weights
        if codes is not None and unit.is_float and unit.world_size > 1:
            self._acquire(unit, "payload", unit.payload_bytes(codes))

    def _release(self, units: Iterable[UnitSpec]) -> None:
        for unit in units:
            self._gathered.remove(unit)
            self._in_use.discard(unit)
            self._reused.discard(unit)
            self._free(unit, "parameters")
            self._free(unit, "payload")

    def _live(self) -> int:
        return sum(unit.numel for unit in self._gathered)

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
        if self._accumulates and placement.grads and placement.grads_tier == "nvme":
            size = max(self._sum_bytes, unit.itemsize)
            self._open_up(_ANY_CHUNKS, min(GRADIENT_CHUNK_ELEMENTS, unit.shard_numel) * size)
        if unit.world_size == 1 or any((unit.name, purpose) in self._open for purpose in _REDUCING):
            return
        own = self._sum_bytes if self._accumulates else unit.itemsize
        local = unit.itemsize if placement.grads else own
        sent = local if self._sent_bytes is None else self._sent_bytes
        if placement.grads and (placement.grads_tier != "device" or self._used_up):
            self._acquire(unit, "staging", unit.shard_numel * own)
        codes = self._communication.quantized_gradients
        if codes is not None and placement.grads:
            self._acquire(unit, "sent", unit.payload_bytes(codes))
            self._acquire(unit, "received", unit.payload_bytes(codes))
            return
        reduction = self._reduction if unit.replicas == 1 else "rank_order"
        if sent != local or reduction == "node_order":
            self._acquire(unit, "sent", unit.numel * sent)
        if reduction == "node_order":
            received = unit.numel * sent if sent > local else 0
        elif reduction == "backend":
            received = unit.shard_numel * sent
        else:
            received = unit.shard_numel * (max(unit.world_size, unit.replicas) - 1) * sent
        if received:
            self._acquire(unit, "received", received)

    def _finish_oldest(self) -> None:
        unit = self._flying.popleft()
        self._free(unit, "received")
        self._free(unit, "sent")
        self._moving.append(unit)
        stored = unit.placement.grads_tier == "nvme"
        if unit.world_size > 1 or not stored:
            self._free(unit, "gradient")
        if not stored:
            self._free(unit, "staging")
        while len(self._moving) > SHARD_TRANSFERS_IN_FLIGHT:
            self._end_transfer()

    def _end_transfer(self) -> None:
        unit = self._moving.popleft()
        self._free(unit, "staging")
        self._free(unit, "gradient")

    def _acquire(self, unit: UnitSpec, purpose: Purpose, nbytes: int) -> None:
        self._open_up((unit.name, purpose), nbytes)

    def _free(self, unit: UnitSpec, purpose: Purpose) -> None:
        self._close((unit.name, purpose))

    def _open_up(self, key: Key, nbytes: int) -> None:
        self._nbytes[key] = max(nbytes, self._nbytes.get(key, 0))
        self._open.setdefault(key, self._now)
        self._now += 1

    def _close(self, key: Key) -> None:
        begin = self._open.pop(key, None)
        if begin is not None:
            self._when[key].append((begin, self._now))
            self._now += 1
