"""A step's demands on the pool, replayed before there is one: who needs how much of it, and when.

The replay does what ``residency.py``, ``gradients.py`` and ``reducer.py`` do, for a model that uses its
parameters in the order of their registration, block by block; inside a block gradients may come in any order.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from zero_ext.config import ZeroConfig
from zero_ext.config.buffer_sizes import BYTES_OF_DTYPE, PIECE_ELEMENTS
from zero_ext.config.overlap_limits import HOMES_UNDER_WAY, READS_AHEAD, REDUCTIONS_IN_FLIGHT, WRITES_BEHIND
from zero_ext.config.quantization_blocks import message_bytes
from zero_ext.config.sections.communication import CODE_BITS, CodeDtype
from zero_ext.config.state_placement import Placement
from zero_ext.zero.memory.pool_plan import Demand, Key, Purpose

# Of gradients on NVMe at once: read ahead for reductions under way, written behind for those that have ended,
# one that is read, one that it is added to.
_PIECES = READS_AHEAD * REDUCTIONS_IN_FLIGHT + WRITES_BEHIND * (HOMES_UNDER_WAY + 1) + 2
_ON_THE_WAY: tuple[Purpose, ...] = ("received", "wire")
_ANY_PIECES: Key = ("", "pieces")


@dataclass(frozen=True, eq=False)
class StagedUnit:
    """What a unit means to staging: ``numel`` elements with padding, of ``itemsize`` bytes, in as many shards
    as there are ranks. Parameters are numbered in the order of registration.

    ``gathered`` are the first and the last of the parameters that the module holds which needs the unit: it
    is gathered from the one to the other, in backward if that ``rereads`` it. Its own gradients come in
    backward from the parameter ``comes`` on, the last of them while backward is at ``completes`` (first and
    last); None where it has none. As many groups of ranks as ``replicas`` have all shards; only what
    ``is_float`` is gathered in codes. ``shared_bytes`` are those of parameters that several modules share,
    ``largest_bytes`` those of its largest parameter.
    """

    name: str
    numel: int
    itemsize: int
    world_size: int
    placement: Placement
    gathered: tuple[int, int]
    comes: int
    completes: tuple[int, int] | None
    replicas: int = 1
    is_float: bool = True
    rereads: bool = True
    shared_bytes: int = 0
    largest_bytes: int = 0

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's shard."""
        return self.numel // self.world_size

    @property
    def nbytes(self) -> int:
        """Bytes of the whole flat buffer."""
        return self.numel * self.itemsize

    def messages_bytes(self, codes: CodeDtype) -> int:
        """Bytes of all shards in ``codes``."""
        return self.world_size * message_bytes(self.shard_numel, CODE_BITS[codes])


def demands_of_a_step(units: Sequence[StagedUnit], config: ZeroConfig, used_up: bool = False) -> list[Demand]:
    """What one forward and backward pass takes from the pool; ``used_up``: each unit's gradient ends with its
    update in backward.

    - Forward, and backward in reverse: a unit is gathered while the module that needs it runs, and ahead of
      it the next one (two where shards come from storage) and as many more as ``units.prefetch_elements`` and
      ``units.live_elements`` allow. What backward needs first stays from forward on, and what
      ``units.reuse_elements`` allows.
    - Parameters that travel in codes have those of all shards beside them until they are needed.
    - A sharded gradient is whole from the block of the unit's last parameter to the end of its reduction.
    - A reduction takes the other ranks' shards, and where they differ a copy in the precision of the wire, or
      twice the codes of all shards, and the shard on its way to another tier, or to an update in backward.
      Two are under way at once, while further gradients come; two more that have ended may be on their way
      to NVMe. Where gradients add up there, pieces of them come back.
    - Forward without autograd: after the last unit the first ones are gathered ahead, for the next call.
    """
    replay = _Replay(units, config, used_up)
    replay.forward(repeats=False)
    replay.backward()
    replay.forward(repeats=True)
    return replay.demands()


def is_reused(unit: object, expected: Iterable[tuple[object, int]], most: int) -> bool:
    """Whether ``unit`` is needed again before more than ``most`` elements are used, of the ``expected`` units
    with so many elements each."""
    used = 0
    for other, numel in expected if most else ():
        if other is unit:
            return True
        used += numel
        if used > most:
            break
    return False


def gathered_once(units: Sequence[StagedUnit], config: ZeroConfig) -> list[StagedUnit]:
    """The sharded ones that a step gathers for forward alone: backward finds them there, or needs none."""
    replay = _Replay(units, config, used_up=False)
    replay.forward(repeats=False)
    return [unit for unit in units if unit.placement.params and not (unit.rereads and replay.needs(unit))]


class _Replay:
    def __init__(self, units: Sequence[StagedUnit], config: ZeroConfig, used_up: bool) -> None:
        self._units = units
        self._sharded = [unit for unit in units if unit.placement.params]
        self._prefetch = config.units.prefetch_elements
        self._live_limit = config.units.live_elements
        self._reuse_limit = config.units.reuse_elements
        self._accumulates = config.batch.gradient_accumulation_steps > 1
        self._sum_bytes = BYTES_OF_DTYPE[config.precision.grad_accum_dtype]
        wire = config.precision.communication_dtype
        self._used_up = used_up
        self._wire_bytes = BYTES_OF_DTYPE[wire] if wire is not None else None
        self._communication = config.communication
        self._reduction = config.precision.reduction
        self._gathered: list[StagedUnit] = []  # or on their way
        self._in_use: set[StagedUnit] = set()
        self._kept: set[StagedUnit] = set()  # from forward to backward, beside what is looked ahead at
        self._flying: deque[StagedUnit] = deque()
        self._moving: deque[StagedUnit] = deque()
        self._now = 0
        self._open: dict[Key, int] = {}
        self._nbytes: dict[Key, int] = {}
        self._when: dict[Key, list[tuple[int, int]]] = defaultdict(list)

    def demands(self) -> list[Demand]:
        """What was replayed so far."""
        return [
            Demand(key, self._nbytes[key], tuple(when), _PIECES if key == _ANY_PIECES else 1)
            for key, when in self._when.items()
        ]

    def needs(self, unit: StagedUnit) -> bool:
        """Whether ``unit`` is neither there nor on its way."""
        return unit not in self._gathered

    def forward(self, repeats: bool) -> None:
        """Every unit in the order of need, the next ones ahead of it; around the end if the pass repeats,
        else on into backward."""
        order = sorted(self._sharded, key=lambda unit: (unit.gathered[0], -unit.gathered[1]))
        for place, unit in enumerate(order):
            around = order[:place] if repeats else []
            then = around if repeats else self._backward_order()
            self._leave([*order[place:], *then], until=unit.gathered[0])
            self._need(unit, [*order[place + 1 :], *around])
        self._leave([] if repeats else self._backward_order())
        wanted = {*self._window(self._backward_order()), *(() if repeats else self._kept)}
        self._release([unit for unit in self._gathered if unit not in wanted])

    def _backward_order(self) -> list[StagedUnit]:
        rereads = [unit for unit in self._sharded if unit.rereads]
        return sorted(rereads, key=lambda unit: (-unit.gathered[1], unit.gathered[0]))

    def backward(self) -> None:
        """The reverse, with gradients: parameter after parameter, from the last one on."""
        order = self._backward_order()
        comes, early, complete = defaultdict(list), defaultdict(list), defaultdict(list)
        for unit in self._units:
            if unit.completes is not None:
                first, last = unit.completes
                comes[unit.comes].append(unit)
                complete[first].append(unit)
                if any(unit.completes == other.completes for other in self._units if other is not unit) or (
                    unit.completes != unit.gathered
                ):
                    early[last].append(unit)
        needs = deque(enumerate(order, 1))
        for number in range(max((unit.gathered[1] for unit in self._units), default=-1), -1, -1):
            while needs and needs[0][1].gathered[1] == number:
                place, unit = needs.popleft()
                self._need(unit, order[place:])
            for unit in comes[number]:
                if unit.placement.grads:
                    self._take(unit, "gradient", unit.nbytes)
            for unit in early[number]:
                self._take_scratch(unit)
            for unit in reversed(complete[number]):
                self._reduce(unit)
            self._release([other for other in self._gathered if other.gathered[0] == number])
        while self._flying:
            self._finish_oldest()
        while self._moving:
            self._settle_oldest()
        self._close(_ANY_PIECES)

    def _need(self, unit: StagedUnit, upcoming: Sequence[StagedUnit]) -> None:
        self._in_use.add(unit)
        self._kept.discard(unit)
        if unit in self._gathered:
            self._give(unit, "messages")
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
            self._give(unit, "messages")
        for later in self._window(upcoming):
            if later not in self._gathered:
                if self._live() + later.numel > self._live_limit:
                    return
                self._gather(later)

    def _window(self, upcoming: Iterable[StagedUnit]) -> Iterator[StagedUnit]:
        """What should be under way of the units expected next."""
        ahead, seen = 0, set[StagedUnit]()
        for unit in upcoming if self._prefetch else ():
            if unit in self._in_use or unit in seen or unit in self._kept:
                continue
            ahead += unit.numel
            least = 2 if unit.placement.params_tier == "nvme" else 1
            if len(seen) >= least and ahead > self._prefetch:
                return
            seen.add(unit)
            yield unit

    def _leave(self, upcoming: Sequence[StagedUnit], until: int | None = None) -> None:
        """Modules before the parameter ``until``, or all, have run: their units go, unless one is needed
        again next."""
        in_use = [unit for unit in self._gathered if unit in self._in_use]
        ended = [unit for unit in in_use if until is None or unit.gathered[1] < until]
        for unit in sorted(ended, key=lambda unit: (unit.gathered[1], -unit.gathered[0])):
            self._in_use.discard(unit)
            if next(self._window(upcoming), None) is unit:
                stays = self._live() <= self._live_limit
            elif stays := is_reused(unit, ((other, other.numel) for other in upcoming), self._reuse_limit):
                following = next((other for other in upcoming if other not in self._gathered), None)
                room = 0 if following is None else following.numel
                stays = self._live() + room <= self._live_limit
                if stays:
                    self._kept.add(unit)
            if not stays:
                self._release([unit])

    def _gather(self, unit: StagedUnit) -> None:
        self._gathered.append(unit)
        self._take(unit, "parameters", unit.nbytes)
        codes = self._communication.quantized_weights
        if codes is not None and unit.is_float and unit.world_size > 1:
            self._take(unit, "messages", unit.messages_bytes(codes))

    def _release(self, units: Iterable[StagedUnit]) -> None:
        for unit in units:
            self._gathered.remove(unit)
            self._in_use.discard(unit)
            self._kept.discard(unit)
            self._give(unit, "parameters")
            self._give(unit, "messages")

    def _live(self) -> int:
        return sum(unit.numel for unit in self._gathered)

    def _reduce(self, unit: StagedUnit) -> None:
        while len(self._flying) >= REDUCTIONS_IN_FLIGHT:
            self._finish_oldest()
        self._flying.append(unit)
        self._take_scratch(unit)
        if unit.world_size == 1:
            self._finish_oldest()

    def _take_scratch(self, unit: StagedUnit) -> None:
        """What a reduction takes, unless the unit has it already."""
        placement = unit.placement
        if self._accumulates and placement.grads and placement.grads_tier == "nvme":
            size = max(self._sum_bytes, unit.itemsize)
            self._open_up(_ANY_PIECES, min(PIECE_ELEMENTS, unit.shard_numel) * size)
        if unit.world_size == 1 or any((unit.name, purpose) in self._open for purpose in _ON_THE_WAY):
            return
        own = self._sum_bytes if self._accumulates else unit.itemsize
        local = unit.itemsize if placement.grads else own
        wire = local if self._wire_bytes is None else self._wire_bytes
        if placement.grads and (placement.grads_tier != "device" or self._used_up):
            self._take(unit, "landing", unit.shard_numel * own)
        codes = self._communication.quantized_gradients
        if codes is not None and placement.grads:
            self._take(unit, "wire", unit.messages_bytes(codes))
            self._take(unit, "received", unit.messages_bytes(codes))
            return
        reduction = self._reduction if unit.replicas == 1 else "rank_order"
        if wire != local or reduction == "node_order":
            self._take(unit, "wire", unit.numel * wire)
        if reduction == "node_order":
            received = unit.numel * wire if wire > local else 0
        elif reduction == "backend":
            received = unit.shard_numel * wire
        else:
            received = unit.shard_numel * (max(unit.world_size, unit.replicas) - 1) * wire
        if received:
            self._take(unit, "received", received)

    def _finish_oldest(self) -> None:
        unit = self._flying.popleft()
        self._give(unit, "received")
        self._give(unit, "wire")
        self._moving.append(unit)
        stored = unit.placement.grads_tier == "nvme"
        if unit.world_size > 1 or not stored:
            self._give(unit, "gradient")
        if not stored:
            self._give(unit, "landing")
        while len(self._moving) > HOMES_UNDER_WAY:
            self._settle_oldest()

    def _settle_oldest(self) -> None:
        unit = self._moving.popleft()
        self._give(unit, "landing")
        self._give(unit, "gradient")

    def _take(self, unit: StagedUnit, purpose: Purpose, nbytes: int) -> None:
        self._open_up((unit.name, purpose), nbytes)

    def _give(self, unit: StagedUnit, purpose: Purpose) -> None:
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
