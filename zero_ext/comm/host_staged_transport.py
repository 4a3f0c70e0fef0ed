"""Exchange of device tensors by way of pinned host memory, where the device has no collectives of its own."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from zero_ext.comm.transport import Message, PointToPoint, Waitable

STAGING_BYTES = 16 << 20
_HALVES = 2  # one is filled or emptied by the device while the other is on its way between the ranks
_GRAIN = 64
_EXIT_PATIENCE_SECONDS = 10.0


class StagedExchange(PointToPoint):
    """Moves device tensors through ``host``, which must serve nobody else, and pinned memory of fixed size.

    A thread copies piece after piece from the device, lets ``host`` exchange it, and copies what came to the
    device, on a stream of its own, after what the current stream had to do at the call. Waiting blocks the
    host until the last piece has come in, and the current stream until it is in place.
    """

    staging_bytes = STAGING_BYTES

    def __init__(self, host: PointToPoint, device: torch.device) -> None:
        super().__init__(host.rank, host.world_size)
        self._device = device
        self._host = host
        room = torch.empty(STAGING_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        thread = threading.Thread(
            target=_work_off,
            args=(self._jobs, _Stager(host, torch.Stream(device=device), room)),
            name="zero_ext-exchange",
            daemon=True,
        )
        # The thread does not know this object. At exit it must be out of torch before the interpreter goes.
        weakref.finalize(self, _end, self._jobs, thread)
        thread.start()

    def start(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int = 0
    ) -> Sequence[Waitable]:
        """See :class:`PointToPoint`."""
        outgoing = [(rank, _bytes_of(tensor)) for rank, tensor in sends]
        incoming = [(rank, _bytes_of(tensor)) for rank, tensor in receives]
        return [self._submit(lambda stager: stager.move(outgoing, incoming, tag))]

    def all_reduce(self, tensor: torch.Tensor) -> Waitable:
        """See :class:`Exchange`."""
        return self._submit(lambda stager: stager.sum(tensor))

    def give_up(self, reason: str) -> None:
        """See :class:`Exchange`."""
        self._host.give_up(reason)

    def _submit(self, action: Callable[[_Stager], None]) -> Waitable:
        job = _Job(action, torch.accelerator.current_stream(self._device).record_event(), self._device)
        self._jobs.put(job)
        return job


class _Job:
    """What the thread does next, and how it ended."""

    def __init__(self, action: Callable[[_Stager], None], ready: torch.Event, device: torch.device) -> None:
        self._action = action
        self._ready = ready
        self._device = device
        self._ended = threading.Event()
        self._arrived: torch.Event | None = None
        self._error: Exception | None = None

    def run(self, stager: _Stager) -> None:
        try:
            stager.stream.wait_event(self._ready)
            with stager.stream:
                self._action(stager)
            self._arrived = stager.stream.record_event()
        except Exception as error:
            self._error = error
        self._ended.set()

    def wait(self) -> None:
        """See :class:`Waitable`."""
        self._ended.wait()
        if self._error is not None:
            raise self._error
        if self._arrived is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._arrived)


class _Piece(NamedTuple):
    """Messages in one half of the room: parts of device tensors, and their places in host memory."""

    sends: list[tuple[int, torch.Tensor, torch.Tensor]]
    receives: list[tuple[int, torch.Tensor, torch.Tensor]]


class _Stager:
    """What the thread works with."""

    def __init__(self, host: PointToPoint, stream: torch.Stream, room: torch.Tensor) -> None:
        self.stream = stream
        self._host = host
        self._room = room.chunk(_HALVES)

    def move(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> None:
        """Sends and receives bytes [n] of device tensors."""
        pieces = self._pieces(sends, receives)
        if not pieces:
            return
        sent = self._bring(pieces[0])
        for number, piece in enumerate(pieces):
            sent.synchronize()
            works = self._host.start(
                [(rank, host) for rank, _, host in piece.sends],
                [(rank, host) for rank, _, host in piece.receives],
                tag,
            )
            if number + 1 < len(pieces):
                sent = self._bring(pieces[number + 1])
            for work in works:
                work.wait()
            for _, device, host in piece.receives:
                device.copy_(host, non_blocking=True)

    def _bring(self, piece: _Piece) -> torch.Event:
        """Starts to copy what a piece sends into its half of the room. What it returns happens after the
        copies of the piece before it in that half, too, since there is one stream: the half is free then."""
        copied: set[int] = set()
        for _, device, host in piece.sends:
            if host.data_ptr() not in copied:
                copied.add(host.data_ptr())
                host.copy_(device, non_blocking=True)
        return self.stream.record_event()

    def _pieces(self, sends: Sequence[Message], receives: Sequence[Message]) -> list[_Piece]:
        places: dict[
            int, int
        ] = {}  # of tensors that are sent, by their address: one for all who get the same
        for _, tensor in sends:
            places.setdefault(tensor.data_ptr(), len(places))
        step = self._room[0].numel() // (len(places) + len(receives)) // _GRAIN * _GRAIN
        longest = max(tensor.numel() for _, tensor in (*sends, *receives))
        pieces = []
        for number, begin in enumerate(range(0, longest, step)):
            rooms = self._room[number % _HALVES].split(step)
            pieces.append(
                _Piece(
                    [
                        (rank, *_both(tensor, rooms[places[tensor.data_ptr()]], begin, step))
                        for rank, tensor in sends
                    ],
                    [
                        (rank, *_both(tensor, rooms[len(places) + index], begin, step))
                        for index, (rank, tensor) in enumerate(receives)
                    ],
                )
            )
        return pieces

    def sum(self, tensor: torch.Tensor) -> None:
        """Sums a small device tensor over the ranks, in place."""
        here = tensor.cpu()
        self._host.all_reduce(here).wait()
        tensor.copy_(here)


def _both(
    tensor: torch.Tensor, room: torch.Tensor, begin: int, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The piece of ``tensor`` from byte ``begin`` on, and its place in ``room``."""
    part = tensor[begin : begin + step]
    return part, room[: part.numel()]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def _work_off(jobs: queue.SimpleQueue[_Job | None], stager: _Stager) -> None:
    while (job := jobs.get()) is not None:
        job.run(stager)
        del job


def _end(jobs: queue.SimpleQueue[_Job | None], thread: threading.Thread) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(_EXIT_PATIENCE_SECONDS)
