"""The inputs of checkpointed calls on their way out of the device's memory and back, ahead of their use."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from enum import Enum
from itertools import islice

import torch

from zero_ext.activation.activation_storage import Place, Room
from zero_ext.activation.ordered_weak_list import Line
from zero_ext.activation.packed_layout import Layout
from zero_ext.activation.partitioned_activations import Partition
from zero_ext.config import Tier
from zero_ext.config.events import ActivationEnd, ActivationWork, Bus
from zero_ext.offload import HERE, Arrival, TransferLog


class State(Enum):
    """Where a record's tensors are."""

    KEPT = "kept"  # in their room, nothing of them on the device
    FETCHING = "fetching"  # what this rank keeps of them is on its way into the device's memory
    PRESENT = "present"  # there, until each receiver has its own


class Record:
    """Tensors of one call, kept until nobody holds the record any more. ``line`` has those of the thread that
    the call ran in, whose backward comes to them one after another."""

    def __init__(self, number: int, layout: Layout, place: Place, line: Line[Record]) -> None:
        self.number = number
        self.line = line
        self.layout = layout
        self.place = place
        self.state = State.KEPT
        self.arrival: Arrival = HERE
        self._part: torch.Tensor | None = None
        self._receivers = [0] * len(layout.spans)
        self._awaited: list[int] = []
        self._tensors: list[torch.Tensor | None] = []

    def add_receiver(self, index: int) -> None:
        """A tensor will be asked for once more whenever the record is fetched."""
        self._receivers[index] += 1

    def to_fetching(self, part: torch.Tensor, arrival: Arrival) -> None:
        """``part`` [layout.part_bytes] is being filled."""
        self._check(State.KEPT)
        self.state, self.arrival, self._part = State.FETCHING, arrival, part

    def to_present(self, region: torch.Tensor) -> None:
        """``region`` [layout.nbytes] holds the tensors."""
        self._check(State.FETCHING)
        self._tensors, self._awaited = list(self.layout.tensors(region)), list(self._receivers)
        self.state, self.arrival, self._part = State.PRESENT, HERE, None

    def hand_out(self, index: int) -> torch.Tensor:
        """A tensor, which its receivers alone hold once the last one has it."""
        self._check(State.PRESENT)
        tensor = self._tensors[index]
        if tensor is None:
            raise AssertionError(f"tensor {index} of record {self.number} was handed out before")
        self._awaited[index] -= 1
        if self._awaited[index] <= 0:
            self._tensors[index] = None
        if max(self._awaited) <= 0:
            self.to_kept()
        return tensor

    def has(self, index: int) -> bool:
        """Whether a tensor is present and waits to be handed out."""
        return self.state is State.PRESENT and self._tensors[index] is not None

    def to_kept(self) -> None:
        """What was fetched goes; the next use fetches it again."""
        if self.state is State.FETCHING:
            self.arrival.wait()
        self.state, self.arrival, self._part = State.KEPT, HERE, None
        self._tensors, self._awaited = [], []

    @property
    def part(self) -> torch.Tensor:
        """The memory that is filled while fetching."""
        if self._part is None:
            raise AssertionError(f"record {self.number} is {self.state.value} and has no part on the device")
        return self._part

    def _check(self, wanted: State) -> None:
        if self.state is not wanted:
            raise AssertionError(f"record {self.number} is {self.state.value}, not {wanted.value}")


class Keeper:
    """Keeps records in ``room``, this rank's part of each where there is a ``partition``, and fetches
    ``ahead`` of them, as much as the rank keeps, before backward comes to them: backward goes through calls
    from the last to the first. Threads may use it at once, each with a line of records of its own.

    Whoever listens to ``bus``, if given, hears how long that takes; ``transfers`` counts what is moved.
    """

    def __init__(
        self,
        room: Room,
        device: torch.device,
        partition: Partition | None = None,
        ahead: int = 1,
        bus: Bus | None = None,
        transfers: TransferLog | None = None,
    ) -> None:
        self.room = room
        self.partition = partition
        self._device = device
        self._ahead = ahead
        self._bus = Bus() if bus is None else bus
        self._transfers = TransferLog() if transfers is None else transfers
        self._count = 0
        self._lines = threading.local()
        # Of the room, the partition and all records. Whoever its thread tells of the work may ask.
        self._lock = threading.RLock()

    def compare(self, tensors: Sequence[torch.Tensor], name: str) -> None:
        """Raises :class:`DifferentInputs` on all ranks of the partition, if there is one, unless their calls
        ``name`` all have the same ``tensors``, maybe none."""
        if self.partition is not None:
            with self._lock:
                self.partition.compare(tensors, name)

    def keep(self, tensors: Sequence[torch.Tensor], name: str) -> Record:
        """A record of ``tensors``, all plain memory on the device, that the call ``name`` gets.

        Raises :class:`RoomIsFull`, or ``RuntimeError`` where storage fails; nothing is kept then.
        """
        began = self._bus.now()
        ranks, rank = (self.partition.size, self.partition.rank) if self.partition else (1, 0)
        layout = Layout.of(tensors, ranks, self.room.block)
        with self._lock:
            try:
                place = self.room.put(layout.part_bytes, lambda part: layout.pack(part, tensors, rank))
            except RuntimeError as error:
                self._give_up(f"keeping the inputs of {name} failed: {error}")
                raise
            self._count += 1
            record = Record(self._count, layout, place, self._line())
            weakref.finalize(record, self.room.give, place).atexit = False
            record.line.add(record)
            self._transfers.record("device", self.room.tier, layout.part_bytes)
            self._tell("keep", name, began, layout.part_bytes)
        return record

    def fetch(self, record: Record, index: int) -> torch.Tensor:
        """A tensor of a record. ``RuntimeError`` where storage fails or another rank gave up."""
        with self._lock:
            return self._fetch(record, index)

    def let_go(self) -> None:
        """Nothing that was kept needs its memory on the device any more."""
        with self._lock:
            self.room.let_go()

    def kept_bytes(self) -> int:
        """Bytes that are kept now."""
        with self._lock:
            return self.room.kept_bytes()

    def held_bytes(self) -> dict[Tier, int]:
        """Bytes taken from each tier, in use or not."""
        with self._lock:
            return self.room.held_bytes()

    def _fetch(self, record: Record, index: int) -> torch.Tensor:
        if record.has(index):
            return record.hand_out(index)
        if record.state is State.PRESENT:
            record.to_kept()
        began = self._bus.now()
        try:
            self._start(record)
            for each in islice(record.line.before(record), self._ahead):
                self._start(each)
            record.arrival.wait()
        except RuntimeError as error:
            self._give_up(f"fetching kept inputs failed: {error}")
            raise
        region = record.part
        if self.partition is not None:
            region = self.partition.gather(region, record.layout)
        record.to_present(region)
        self._tell("fetch", "", began, record.layout.part_bytes)
        return record.hand_out(index)

    def _start(self, record: Record) -> None:
        if record.state is not State.KEPT:
            return
        part = torch.empty(record.layout.part_bytes, dtype=torch.uint8, device=self._device)
        self._transfers.record(self.room.tier, "device", part.nbytes)
        record.to_fetching(part, self.room.fetch(record.place, part))

    def _line(self) -> Line[Record]:
        """This thread's."""
        if not hasattr(self._lines, "line"):
            self._lines.line = Line()
        return self._lines.line

    def _give_up(self, reason: str) -> None:
        if self.partition is not None:
            self.partition.give_up(reason)

    def _tell(self, what: ActivationWork, name: str, began: float | None, nbytes: int) -> None:
        if began is not None:
            self._bus.publish(ActivationEnd(what, name, began, time.perf_counter() - began, nbytes))
