"""Offload the inputs of checkpointed calls, and prefetch them in backward."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import islice

import torch

from zero_ext.activation.activation_storage import ActivationExtent, ActivationStorage
from zero_ext.activation.packed_layout import PackedLayout
from zero_ext.activation.partitioned_activations import ActivationPartition
from zero_ext.config import Tier
from zero_ext.config.events import ActivationEnd, ActivationWork, Bus
from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.offload import COMPLETED, CopyHandle, TransferStats


class OrderedWeakList:
    """Records that others own, each added with a greater number than the one before it, at the same cost
    however many there are.

    A dead one is removed at the next call. The thread that drops it, maybe inside a finalizer, only notes
    its number.
    """

    def __init__(self) -> None:
        self._items: dict[int, weakref.ref[ActivationRecord]] = {}
        # A ring of the numbers; 0 stands between the last one and the first one.
        self._before, self._after = {0: 0}, {0: 0}
        self._gone: deque[int] = deque()

    def __len__(self) -> int:
        self._forget()
        return len(self._items)

    def add(self, record: ActivationRecord) -> None:
        """Put ``record`` at the end."""
        self._forget()
        number = record.number
        self._items[number] = weakref.ref(record)
        self._link(self._before[0], number)
        self._link(number, 0)
        weakref.finalize(record, self._gone.append, number).atexit = False

    def before(self, record: ActivationRecord) -> Iterator[ActivationRecord]:
        """Yield the records before ``record``, the nearest one first."""
        self._forget()
        number = self._before[record.number]
        while number:
            found = self._items[number]()
            if found is not None:
                yield found
            number = self._before[number]

    def _link(self, number: int, after: int) -> None:
        self._after[number], self._before[after] = after, number

    def _forget(self) -> None:
        while self._gone:
            number = self._gone.popleft()
            del self._items[number]
            self._link(self._before.pop(number), self._after.pop(number))


class RecordState(Enum):
    """The state of a record's tensors."""

    OFFLOADED = "offloaded"  # in their storage, not on the device
    FETCHING = "fetching"  # this rank's shard is being copied to the device
    PRESENT = "present"  # there, until each receiver has its own


class ActivationRecord:
    """Tensors of one call, stored while the record is referenced.

    ``queue`` has the records of the thread that the call ran in. Its backward uses them one after another.
    """

    def __init__(
        self, number: int, layout: PackedLayout, extent: ActivationExtent, queue: OrderedWeakList
    ) -> None:
        self.number, self.layout, self.extent, self.queue = number, layout, extent, queue
        self.state = RecordState.OFFLOADED
        self.copy_handle: CopyHandle = COMPLETED
        self._shard: torch.Tensor | None = None
        self._receivers = [0] * len(layout.spans)
        self._awaited: list[int] = []
        self._tensors: list[torch.Tensor | None] = []

    def add_receiver(self, index: int) -> None:
        """Expect one more request for a tensor whenever the record is fetched."""
        self._receivers[index] += 1

    def to_fetching(self, shard: torch.Tensor, copy_handle: CopyHandle) -> None:
        """``shard`` [layout.shard_bytes] is being filled."""
        self._check(RecordState.OFFLOADED)
        self.state, self.copy_handle, self._shard = RecordState.FETCHING, copy_handle, shard

    def to_present(self, region: torch.Tensor) -> None:
        """``region`` [layout.nbytes] holds the tensors."""
        self._check(RecordState.FETCHING)
        self._tensors, self._awaited = list(self.layout.tensors(region)), list(self._receivers)
        self.state, self.copy_handle, self._shard = RecordState.PRESENT, COMPLETED, None

    def hand_out(self, index: int) -> torch.Tensor:
        """Return a tensor, which its receivers alone hold once the last one has it."""
        self._check(RecordState.PRESENT)
        tensor = self._tensors[index]
        if tensor is None:
            raise zero_ext_bug(f"tensor {index} of record {self.number} was handed out before")
        self._awaited[index] -= 1
        if self._awaited[index] <= 0:
            self._tensors[index] = None
        if max(self._awaited) <= 0:
            self.to_offloaded()
        return tensor

    def has(self, index: int) -> bool:
        """Return whether a tensor is present and waits to be handed out."""
        return self.state is RecordState.PRESENT and self._tensors[index] is not None

    def to_offloaded(self) -> None:
        """Drop the copy on the device. The next use fetches it again."""
        if self.state is RecordState.FETCHING:
            self.copy_handle.wait()
        self.state, self.copy_handle, self._shard = RecordState.OFFLOADED, COMPLETED, None
        self._tensors, self._awaited = [], []

    @property
    def shard(self) -> torch.Tensor:
        """The memory that is filled while fetching."""
        if self._shard is None:
            raise zero_ext_bug(f"record {self.number} is {self.state.value} and has no shard on the device")
        return self._shard

    def _check(self, wanted: RecordState) -> None:
        if self.state is not wanted:
            raise zero_ext_bug(f"record {self.number} is {self.state.value}, not {wanted.value}")


class _ThreadLocal(threading.local):
    """The records of each thread."""

    def __init__(self) -> None:
        self.queue = OrderedWeakList()


class ActivationOffloader:
    """Stores records in ``storage``, and prefetches ``ahead`` of them in backward.

    With a ``partition`` each rank stores and fetches its shard of a record. Backward goes through calls from
    the last to the first. Several threads may use it simultaneously, each with its own queue of records.

    Durations are published on ``bus``, if given. ``transfers`` counts what is moved.
    """

    def __init__(
        self,
        storage: ActivationStorage,
        device: torch.device,
        partition: ActivationPartition | None = None,
        ahead: int = 1,
        bus: Bus | None = None,
        transfers: TransferStats | None = None,
    ) -> None:
        self.storage, self.partition = storage, partition
        self._device, self._ahead = device, ahead
        self._bus = Bus() if bus is None else bus
        self._transfers = TransferStats() if transfers is None else transfers
        self._count = 0
        self._thread_local = _ThreadLocal()
        # Guards storage, partition and all records. Reentrant: subscribers of the bus may call back.
        self._lock = threading.RLock()

    def compare(self, tensors: Sequence[torch.Tensor], name: str) -> None:
        """Raise :class:`DifferentInputsError` on all ranks of the partition, if any, unless their calls
        ``name`` all have the same ``tensors``, maybe none."""
        if self.partition is not None:
            with self._lock:
                self.partition.compare(tensors, name)

    def offload(self, tensors: Sequence[torch.Tensor], name: str) -> ActivationRecord:
        """Return a record of ``tensors``, all plain memory on the device, inputs of the call ``name``.

        Raises :class:`BufferFullError`, or ``RuntimeError`` where storage fails; nothing is stored then.
        """
        began = self._bus.now()
        ranks, rank = (self.partition.size, self.partition.rank) if self.partition else (1, 0)
        layout = PackedLayout.of(tensors, ranks, self.storage.block)
        with self._lock:
            try:
                extent = self.storage.put(layout.shard_bytes, lambda shard: layout.pack(shard, tensors, rank))
            except RuntimeError as error:
                self._abort(f"offloading the inputs of {name} failed: {error}")
                raise
            self._count += 1
            record = ActivationRecord(self._count, layout, extent, self._thread_local.queue)
            weakref.finalize(record, self.storage.release, extent).atexit = False
            record.queue.add(record)
            self._transfers.record("device", self.storage.tier, layout.shard_bytes)
            self._publish("offload", name, began, layout.shard_bytes)
        return record

    def fetch(self, record: ActivationRecord, index: int) -> torch.Tensor:
        """Return a tensor of a record. ``RuntimeError`` where storage fails or another rank aborted."""
        with self._lock:
            if record.has(index):
                return record.hand_out(index)
            if record.state is RecordState.PRESENT:
                record.to_offloaded()
            began = self._bus.now()
            try:
                self._start(record)
                for each in islice(record.queue.before(record), self._ahead):
                    self._start(each)
                record.copy_handle.wait()
            except RuntimeError as error:
                self._abort(f"fetching offloaded inputs failed: {error}")
                raise
            region = record.shard
            if self.partition is not None:
                region = self.partition.gather(region, record.layout)
            record.to_present(region)
            self._publish("fetch", "", began, record.layout.shard_bytes)
            return record.hand_out(index)

    def release_sources(self) -> None:
        """Wait until nothing that was offloaded needs its memory on the device."""
        with self._lock:
            self.storage.release_sources()

    def used_bytes(self) -> int:
        """Return the bytes that are stored now."""
        with self._lock:
            return self.storage.used_bytes()

    def allocated_bytes(self) -> dict[Tier, int]:
        """Return the bytes allocated in each tier, in use or not."""
        with self._lock:
            return self.storage.allocated_bytes()

    def _start(self, record: ActivationRecord) -> None:
        if record.state is not RecordState.OFFLOADED:
            return
        shard = torch.empty(record.layout.shard_bytes, dtype=torch.uint8, device=self._device)
        self._transfers.record(self.storage.tier, "device", shard.nbytes)
        record.to_fetching(shard, self.storage.fetch(record.extent, shard))

    def _abort(self, reason: str) -> None:
        if self.partition is not None:
            self.partition.abort(reason)

    def _publish(self, what: ActivationWork, name: str, began: float | None, nbytes: int) -> None:
        if began is not None:
            self._bus.publish(ActivationEnd(what, name, began, time.perf_counter() - began, nbytes))
