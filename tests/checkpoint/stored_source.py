"""A stand-in for an engine with state on NVMe: the fake source's tensors play the disk, behind a meter."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.checkpoint.fake_source import FakeSource, TensorSlice
from zero_ext.checkpoint import StoredValues

BLOCK = 1024  # elements; a write changes whole blocks, as a disk does


class Block(bytearray):
    """Memory that a weak reference can follow."""


class Meter:
    """What was asked of the stores of one source; strikes at the n-th read or write (from 0)."""

    def __init__(self, failing_read: int | None = None, failing_write: int | None = None) -> None:
        self.reads = 0
        self.writes = 0
        self.alive = 0
        self.peak = 0
        self.largest_write = 0
        self.written: dict[int, list[tuple[int, int]]] = {}
        self._failing = {"read": failing_read, "write": failing_write}
        self._busy = threading.Lock()

    def begin(self, kind: str, number: int) -> None:
        if not self._busy.acquire(blocking=False):
            raise AssertionError(f"a {kind} while another call is under way")
        if number == self._failing[kind]:
            self._busy.release()
            raise RuntimeError(f"{kind} of number {number}: Input/output error")

    def end(self) -> None:
        self._busy.release()

    def copy(self, data: torch.Tensor) -> torch.Tensor:
        """A copy whose bytes count as alive until nobody can reach them."""
        block = Block(data.nbytes)
        self.alive += data.nbytes
        self.peak = max(self.peak, self.alive)
        weakref.finalize(block, self._forget, data.nbytes)
        return torch.frombuffer(block, dtype=data.dtype).copy_(data)

    def _forget(self, size: int) -> None:
        self.alive -= size


class FakeStore:
    """``content`` (1-D) as values on a disk."""

    def __init__(self, content: torch.Tensor, meter: Meter) -> None:
        self.numel = content.numel()
        self.dtype = content.dtype
        self._content = content
        self._meter = meter

    def read(self, begin: int, end: int) -> torch.Tensor:
        assert 0 <= begin < end <= self.numel
        self._meter.begin("read", self._meter.reads)
        self._meter.reads += 1
        found = self._meter.copy(self._content[begin:end])
        self._meter.end()
        return found

    def write(self, begin: int, values: torch.Tensor) -> None:
        end = begin + values.numel()
        assert 0 <= begin < end <= self.numel
        assert values.dtype == self.dtype
        assert values.dim() == 1
        assert values.is_contiguous()
        self._meter.begin("write", self._meter.writes)
        self._meter.writes += 1
        self._meter.largest_write = max(self._meter.largest_write, values.nbytes)
        self._meter.written.setdefault(self._content.data_ptr(), []).append((begin, end))
        low, high = begin // BLOCK * BLOCK, min(-(-end // BLOCK) * BLOCK, self.numel)
        blocks = self._content[low:high].clone()
        blocks[begin - low : end - low] = values
        self._content[low:high] = blocks
        self._meter.end()


class StoredSource(FakeSource):
    """A source of which all that ``stored`` names (kind, name) is in a store; everything by default."""

    def __init__(
        self,
        *arguments: Any,
        meter: Meter | None = None,
        stored: Callable[[str, str], bool] = lambda kind, name: True,
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, **settings)
        self.meter = meter or Meter()
        self.stored = stored

    def _wrapped(self, slices: Iterator[TensorSlice]) -> Iterator[TensorSlice]:
        for owned in slices:
            if isinstance(owned.tensor, torch.Tensor) and self.stored(owned.kind, owned.name):
                yield owned._replace(tensor=FakeStore(owned.tensor, self.meter))
            else:
                yield owned

    def save_slices(self) -> Iterator[TensorSlice]:
        return self._wrapped(super().save_slices())

    def load_slices(self) -> Iterator[TensorSlice]:
        return self._wrapped(super().load_slices())


class FileValues:
    """float32 values that really are in a file and nowhere else."""

    def __init__(self, path: str, numel: int) -> None:
        self.numel = numel
        self.dtype = torch.float32
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._descriptor, 4 * numel)

    def read(self, begin: int, end: int) -> torch.Tensor:
        data = bytearray(4 * (end - begin))
        assert os.preadv(self._descriptor, [data], 4 * begin) == len(data)
        return torch.frombuffer(data, dtype=torch.float32)

    def write(self, begin: int, values: torch.Tensor) -> None:
        data = values.numpy()
        assert os.pwrite(self._descriptor, data, 4 * begin) == data.nbytes


class FileSource(FakeSource):
    """One rank whose state, "master" of "w", is in the file ``values``."""

    def __init__(self, table: Any, values: StoredValues) -> None:
        super().__init__({}, 1)
        self.table = table
        self.values = values

    def save_slices(self) -> Iterator[TensorSlice]:
        yield TensorSlice("master", "w", 0, self.values)

    def load_slices(self) -> Iterator[TensorSlice]:
        return self.save_slices()
