"""Reused memory for what is whole only for a moment: gathered units, their gradients, received shards."""

from __future__ import annotations

from collections import defaultdict

import torch

from zero_ext import ops


class BufferPool:
    """Huge-page buffers of exact sizes, taken and given back; idle ones are reused by size.

    ``idle_bytes_limit`` bounds what is kept while unused: a buffer given back beyond it is freed, oldest
    size first. ``live_bytes`` counts what is in use, ``total_bytes`` both. See ``docs/design.md`` for why
    the units do not simply resize their storage.
    """

    def __init__(self, idle_bytes_limit: int) -> None:
        self._idle: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._idle_bytes_limit = idle_bytes_limit
        self.live_bytes = 0
        self.idle_bytes = 0

    @property
    def total_bytes(self) -> int:
        """Bytes the pool holds: in use and idle."""
        return self.live_bytes + self.idle_bytes

    def take(self, nbytes: int) -> torch.Tensor:
        """A uint8 buffer of exactly ``nbytes``, its contents undefined."""
        self.live_bytes += nbytes
        if self._idle[nbytes]:
            self.idle_bytes -= nbytes
            return self._idle[nbytes].pop()
        self._shrink(self._idle_bytes_limit - nbytes)
        return ops.host_buffer(nbytes)

    def give(self, buffer: torch.Tensor) -> None:
        """Takes back a buffer handed out by :meth:`take`; nobody may use it any more."""
        nbytes = buffer.nbytes
        self.live_bytes -= nbytes
        self.idle_bytes += nbytes
        self._idle[nbytes].append(buffer)
        self._shrink(self._idle_bytes_limit)

    def clear(self) -> None:
        """Frees everything idle."""
        self._shrink(0)

    def _shrink(self, limit: int) -> None:
        for nbytes, buffers in self._idle.items():
            while buffers and self.idle_bytes > max(limit, 0):
                buffers.pop()
                self.idle_bytes -= nbytes


def allocate(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A zeroed flat tensor [numel] on huge pages, for state that lives as long as its model."""
    return ops.host_buffer(numel * dtype.itemsize).view(dtype)


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
