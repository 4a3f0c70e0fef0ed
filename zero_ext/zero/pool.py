"""Reused memory for what is whole only for a moment: gathered units, their gradients, received shards."""

from __future__ import annotations

from collections import defaultdict

import torch

from zero_ext import ops


class BufferPool:
    """Huge-page buffers of exact sizes, taken and given back; idle ones are reused by size.

    The pool holds at most what was in use at its busiest moment and one buffer more: idle buffers of other
    sizes are freed when a new one would go beyond that. ``live_bytes`` counts what is in use. See
    ``docs/design.md`` for why the units do not simply resize their storage.
    """

    def __init__(self) -> None:
        self._idle: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._most_live = 0
        self._largest = 0
        self.live_bytes = 0
        self.idle_bytes = 0

    @property
    def total_bytes(self) -> int:
        """Bytes the pool holds: in use and idle."""
        return self.live_bytes + self.idle_bytes

    def take(self, nbytes: int) -> torch.Tensor:
        """A uint8 buffer of exactly ``nbytes``, its contents undefined."""
        self.live_bytes += nbytes
        self._most_live = max(self._most_live, self.live_bytes)
        self._largest = max(self._largest, nbytes)
        if self._idle[nbytes]:
            self.idle_bytes -= nbytes
            return self._idle[nbytes].pop()
        self._shrink(self._most_live + self._largest - self.live_bytes)
        with torch.inference_mode(False):  # the pool also lends buffers to training
            return ops.host_buffer(nbytes)

    def give(self, buffer: torch.Tensor) -> None:
        """Takes back a buffer handed out by :meth:`take`; nobody may use it any more."""
        nbytes = buffer.nbytes
        self.live_bytes -= nbytes
        self.idle_bytes += nbytes
        # Most recently used last, so that the size used longest ago is freed first.
        self._idle[nbytes] = [*self._idle.pop(nbytes, []), buffer]

    def _shrink(self, limit: int) -> None:
        for nbytes, buffers in self._idle.items():
            while buffers and self.idle_bytes > limit:
                buffers.pop()
                self.idle_bytes -= nbytes


def attach(storage: torch.UntypedStorage, buffer: torch.Tensor) -> None:
    """Swaps the memory of ``buffer`` into the empty ``storage`` of equal size, keeping the storage object.

    Tensors that autograd saved as views of ``storage`` then see the new memory.
    """
    if hasattr(storage, "_swap_data_ptr_"):
        storage._swap_data_ptr_(buffer.untyped_storage())
    else:
        storage.resize_(buffer.nbytes)


def detach(storage: torch.UntypedStorage, buffer: torch.Tensor) -> None:
    """The reverse of :func:`attach`: ``storage`` is empty again and ``buffer`` has its memory back."""
    if hasattr(storage, "_swap_data_ptr_"):
        storage._swap_data_ptr_(buffer.untyped_storage())
    else:
        storage.resize_(0)
