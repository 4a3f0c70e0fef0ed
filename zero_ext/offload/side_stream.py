"""Work alongside the current stream of a device, and waiting for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch


class CopyHandle(Protocol):
    """An asynchronous copy from a source to a destination.

    The host waits where the memory is the host's. Only the current stream waits where it is an accelerator's.
    """

    def wait(self) -> None:
        """Wait until the destination may be used. Raise ``RuntimeError`` if the copy failed."""

    def wait_source(self) -> None:
        """Wait until the source may be changed. Only :meth:`wait` raises errors of the copy."""
        with contextlib.suppress(RuntimeError):
            self.wait()

    def stream_context(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which work of the current stream comes after the copy.

        The streams outside continue. Raise as :meth:`wait` does.
        """
        self.wait()
        return contextlib.nullcontext()


class CompletedCopy(CopyHandle):
    """A copy that has ended."""

    def wait(self) -> None:
        """See :class:`CopyHandle`."""


COMPLETED = CompletedCopy()


class SideStream:
    """Work that is given inside :meth:`entered` runs alongside that of the stream outside.

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
        """Let the current stream go on after all that was entered."""
        if self._stream is not None and not self._joined:
            _current_of(self._stream).wait_event(self._stream.record_event())
            # The current stream follows all reads now, so it may reuse the memory of what was held.
            self._joined, self._held, self._read = True, [], None

    def position(self) -> CopyHandle:
        """Return the end of what was given so far to this stream by who is inside; of the outer stream nobody
        needs to wait for it.
        """
        stream = self._inside
        return COMPLETED if stream is None else _Position(stream)

    def hold(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keep ``tensors`` of the outer stream, which what was given so far reads, until :meth:`release`."""
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
    """A :class:`CopyHandle`: the end of what a stream was given when this was made."""

    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream
        self._event = stream.record_event()

    def wait(self) -> None:
        _current_of(self._stream).wait_event(self._event)

    wait_source = wait

    def stream_context(self) -> contextlib.AbstractContextManager[object]:
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
        # ``set_stream`` also makes the device of its stream the current one, so the index is
        # restored after it.
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(index)


class Readback:
    """A small tensor [n] on its way to the host; one in host memory is there."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values
        self._event: torch.Event | None = None
        if values.device.type != "cpu":
            self._values = torch.empty_like(values, device="cpu", pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.accelerator.current_stream(values.device).record_event()

    @property
    def arrived(self) -> bool:
        """Return whether :meth:`read` returns immediately."""
        if self._event is not None and self._event.query():
            self._event = None
        return self._event is None

    def read(self) -> torch.Tensor:
        """Return the values in host memory. The host waits for a device that has not computed them yet."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._values
