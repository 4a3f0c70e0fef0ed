"""Transport of device tensors through pinned host memory, for devices without their own collectives."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from zero_ext.comm.transport import PeerPayload, PointToPointTransport, Waitable

STAGING_BYTES = 16 << 20
_HALVES = 2  # one is filled or emptied by the device while the other is on its way between the ranks
_GRAIN = 64
_EXIT_PATIENCE_SECONDS = 10.0


class HostStagedTransport(PointToPointTransport):
    """Moves device tensors through ``host``, which must serve nobody else, and pinned memory of fixed size.

    A thread copies chunk after chunk from the device, sends it over ``host``, and copies the result to the
    device, on a stream of its own, after what the current stream had to do at the call. Waiting blocks the
    host until the last chunk has been received, and the current stream until it is copied.
    """

    staging_bytes = STAGING_BYTES

    def __init__(self, host: PointToPointTransport, device: torch.device) -> None:
        super().__init__(host.rank, host.world_size)
        self._device = device
        self._host = host
        buffer = torch.empty(STAGING_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
        self._jobs: queue.SimpleQueue[_StagedTransfer | None] = queue.SimpleQueue()
        thread = threading.Thread(
            target=_work_off,
            args=(self._jobs, _Stager(host, torch.Stream(device=device), buffer)),
            name="zero_ext-transport",
            daemon=True,
        )
        # The thread does not know this object. At exit it must be out of torch before the interpreter goes.
        weakref.finalize(self, _end, self._jobs, thread)
        thread.start()

    def start(
        self, sends: Sequence[PeerPayload], receives: Sequence[PeerPayload], tag: int = 0
    ) -> Sequence[Waitable]:
        """Queue the transfers for the thread."""
        outgoing = [(rank, _bytes_of(tensor)) for rank, tensor in sends]
        incoming = [(rank, _bytes_of(tensor)) for rank, tensor in receives]
        return [self._submit(lambda stager: stager.move(outgoing, incoming, tag))]

    def all_reduce(self, tensor: torch.Tensor, tag: int = 0) -> Waitable:
        """Sum over ``host``, in rank order."""
        return self._submit(lambda stager: stager.sum(tensor, tag))

    def abort(self, reason: str) -> None:
        """Abort ``host``."""
        self._host.abort(reason)

    def _submit(self, action: Callable[[_Stager], None]) -> Waitable:
        job = _StagedTransfer(
            action, torch.accelerator.current_stream(self._device).record_event(), self._device
        )
        self._jobs.put(job)
        return job


class _StagedTransfer:
    """One transfer for the thread to run, and its outcome."""

    def __init__(self, action: Callable[[_Stager], None], ready: torch.Event, device: torch.device) -> None:
        self._action = action
        self._ready = ready
        self._device = device
        self._ended = threading.Event()
        self._arrived: torch.Event | None = None
        self._error: BaseException | None = None

    def run(self, stager: _Stager) -> None:
        try:
            stager.stream.wait_event(self._ready)
            with stager.stream:
                self._action(stager)
            self._arrived = stager.stream.record_event()
        except BaseException as error:
            self._error = error  # whatever ends the thread, nobody waits for it forever
        self._ended.set()

    def wait(self) -> None:
        """See :class:`Waitable`."""
        self._ended.wait()
        if self._error is not None:
            raise self._error
        if self._arrived is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._arrived)


class _StagedChunk(NamedTuple):
    """Payloads in one half of the buffer: slices of device tensors, and their slots in host memory."""

    sends: list[tuple[int, torch.Tensor, torch.Tensor]]
    receives: list[tuple[int, torch.Tensor, torch.Tensor]]


class _Stager:
    """The state of the thread."""

    def __init__(self, host: PointToPointTransport, stream: torch.Stream, buffer: torch.Tensor) -> None:
        self.stream = stream
        self._host = host
        self._buffer = buffer.chunk(_HALVES)

    def move(self, sends: Sequence[PeerPayload], receives: Sequence[PeerPayload], tag: int) -> None:
        """Send and receives bytes [n] of device tensors."""
        chunks = self._chunks(sends, receives)
        if not chunks:
            return
        sent = self._bring(chunks[0])
        for number, chunk in enumerate(chunks):
            # ``host`` reads the memory without regard to streams, so the host itself has to wait.
            sent.synchronize()
            works = self._host.start(
                [(rank, host) for rank, _, host in chunk.sends],
                [(rank, host) for rank, _, host in chunk.receives],
                tag,
            )
            if number + 1 < len(chunks):
                sent = self._bring(chunks[number + 1])
            for work in works:
                work.wait()
            for _, device, host in chunk.receives:
                device.copy_(host, non_blocking=True)

    def _bring(self, chunk: _StagedChunk) -> torch.Event:
        """Start to copy what a chunk sends into its half of the buffer.

        The event returned also follows the copies of the chunk before it in that half, since there is one
        stream. The half is free then.
        """
        copied: set[int] = set()
        for _, device, host in chunk.sends:
            if host.data_ptr() not in copied:
                copied.add(host.data_ptr())
                host.copy_(device, non_blocking=True)
        return self.stream.record_event()

    def _chunks(self, sends: Sequence[PeerPayload], receives: Sequence[PeerPayload]) -> list[_StagedChunk]:
        # Tensors that are sent, by address: one slot for all ranks that get the same.
        # Both ends of a payload must cut it into the same chunks, whose size follows from the
        # number of slots. One slot per rank would cut a broadcast smaller at its source than at its
        # receivers.
        slot_of: dict[int, int] = {}
        for _, tensor in sends:
            slot_of.setdefault(tensor.data_ptr(), len(slot_of))
        step = self._buffer[0].numel() // (len(slot_of) + len(receives)) // _GRAIN * _GRAIN
        longest = max(tensor.numel() for _, tensor in (*sends, *receives))
        chunks = []
        for number, begin in enumerate(range(0, longest, step)):
            slots, span = self._buffer[number % _HALVES].split(step), slice(begin, begin + step)
            sent = [(rank, *_both(tensor[span], slots[slot_of[tensor.data_ptr()]])) for rank, tensor in sends]
            free = zip(receives, slots[len(slot_of) :], strict=False)
            received = [(rank, *_both(tensor[span], slot)) for (rank, tensor), slot in free]
            chunks.append(_StagedChunk(sent, received))
        return chunks

    def sum(self, tensor: torch.Tensor, tag: int) -> None:
        """Sum a small device tensor over the ranks, in place."""
        host = tensor.cpu()
        self._host.all_reduce(host, tag).wait()
        tensor.copy_(host)


def _both(source: torch.Tensor, slot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``source`` and its bytes in ``slot``."""
    return source, slot[: source.numel()]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def _work_off(jobs: queue.SimpleQueue[_StagedTransfer | None], stager: _Stager) -> None:
    while (job := jobs.get()) is not None:
        job.run(stager)
        # Its action refers to tensors, which would otherwise stay allocated until the next job
        # comes.
        del job


def _end(jobs: queue.SimpleQueue[_StagedTransfer | None], thread: threading.Thread) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(_EXIT_PATIENCE_SECONDS)
