"""What goes on beside the current stream of a device, and how it is waited for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch


class Arrival(Protocol):
    """Elements on their way from a source to a destination.

    Whoever owns memory waits for it: the host where it is host memory, the current stream, and the host not,
    where it is an accelerator's.
    """

    def wait(self) -> None:
        """The destination may be used from here on; raises ``RuntimeError`` if they cannot get there."""

    def let_go(self) -> None:
        """The source may be changed from here on; errors are told by :meth:`wait` alone."""

    def followed(self) -> contextlib.AbstractContextManager[object]:
        """Inside, what is started in the current stream comes after the arrival, while the streams of
        outside go on. Raises as :meth:`wait` does."""


class Here:
    """An :class:`Arrival` that has happened."""

    def wait(self) -> None:
        """See :class:`Arrival`."""

    def let_go(self) -> None:
        """See :class:`Arrival`."""

    def followed(self) -> contextlib.AbstractContextManager[object]:
        """See :class:`Arrival`."""
        return contextlib.nullcontext()


HERE = Here()


class SideStream:
    """Work that is given inside :meth:`entered` runs beside that of the stream outside.

    It comes after all that the outer stream was given before. The outer stream comes after it at
    :meth:`join`, or before it uses the same memory, see :meth:`position`. On a CPU there is one order, that
    of the calls, and nothing here does anything.

    torch's allocator gives memory of the outer stream to new tensors of that stream as soon as nobody names
    it any more, whatever other streams do with it. What is read here is therefore held (:meth:`hold`), or
    known to the allocator (:meth:`drop`).
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        self._held: list[torch.Tensor] = []
        self._read: torch.Event | None = None  # after which nothing reads what is held
        self._joined = True

    @property
    def _inside(self) -> torch.Stream | None:
        stream = self._stream
        return stream if stream is not None and _current_of(stream) == stream else None

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, this is the thread's current stream."""
        stream = self._stream
        if stream is None or self._inside:
            yield
            return
        stream.wait_event(_current_of(stream).record_event())
        self._joined = False
        with current(stream):
            yield

    def join(self) -> None:
        """The current stream goes on after all that was entered."""
        if self._stream is not None and not self._joined:
            _current_of(self._stream).wait_event(self._stream.record_event())
            self._joined, self._held, self._read = True, [], None

    def position(self) -> Arrival:
        """The end of what was given so far to this stream by who is inside; of the outer stream nobody needs
        to wait for it."""
        stream = self._inside
        return HERE if stream is None else _Position(stream)

    def hold(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keeps ``tensors`` of the outer stream, which what was given so far reads, until :meth:`release`."""
        if (stream := self._inside) is not None:
            self._held += tensors
            self._read = stream.record_event()

    def release(self) -> None:
        """Outside: drops the tensors that are held; the current stream may use their memory when they have
        been read."""
        if self._stream is not None and self._read is not None:
            _current_of(self._stream).wait_event(self._read)
            self._held, self._read = [], None

    def drop(self, tensor: torch.Tensor) -> None:
        """``tensor`` of the outer stream is dropped by the caller; its memory is reused after the work given
        so far."""
        if (stream := self._inside) is not None:
            tensor.record_stream(stream)


class _Position:
    """An :class:`Arrival`: the end of what a stream was given when this was made."""

    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream
        self._event = stream.record_event()

    def wait(self) -> None:
        _current_of(self._stream).wait_event(self._event)

    let_go = wait

    def followed(self) -> contextlib.AbstractContextManager[object]:
        return current(self._stream)


def _current_of(stream: torch.Stream) -> torch.Stream:
    return torch.accelerator.current_stream(stream.device)


@contextlib.contextmanager
def current(stream: torch.Stream) -> Iterator[None]:
    """``stream`` is the thread's current one inside.

    A ``torch.Stream`` as a context manager keeps in itself what was current before: of two threads that enter
    the same one, each may go back to the other's.
    """
    index = torch.accelerator.current_device_index()
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(index)
