"""The plan of a load: bytes of files and the state that they fill. Made and checked before reading."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

from zero_ext.checkpoint.files.raw_buffers import byte_view
from zero_ext.checkpoint.format.dtypes import dtype_named
from zero_ext.checkpoint.format.manifest import Manifest, SliceRecord
from zero_ext.checkpoint.format.state_source import StoredValues, TensorSlice
from zero_ext.checkpoint.transfer.chunk_reader import Chunk, ChunkRequest, slice_chunks
from zero_ext.checkpoint.transfer.device_staging import DeviceStaging
from zero_ext.checkpoint.transfer.slice_io import check_values, element_count, write_stored


class FillTarget(NamedTuple):
    """A slice of a stored tensor to be filled, by the name it has in the checkpoint."""

    kind: str
    name: str
    start: int
    values: torch.Tensor | StoredValues

    @property
    def numel(self) -> int:
        """Elements to be filled."""
        return element_count(self.values)

    def put(self, begin: int, found: torch.Tensor, staging: DeviceStaging) -> None:
        """Fill the slice's elements from ``begin`` on with ``found`` (1-D, host memory; floats convert).

        What is on a device gets them through ``staging``. CheckpointError naming the slice if its store
        cannot take them.
        """
        if not isinstance(self.values, torch.Tensor):
            write_stored(self.values, begin, found, f"{self.kind} of {self.name!r}")
            return
        destination = self.values[begin : begin + found.numel()]
        if destination.device.type != "cpu":
            staging.write(destination, found.to(destination.dtype))
        elif found.data_ptr() != destination.data_ptr():
            destination.copy_(found)
        # Written behind autograd's back: a graph that has saved the old values must find out.
        torch.autograd.graph.increment_version(destination)


class Fill(NamedTuple):
    """Elements of one chunk, from ``skip`` on, that belong in elements [begin, end) of ``target`` (floats
    convert)."""

    chunk: Chunk
    dtype: torch.dtype
    skip: int
    target: FillTarget
    begin: int
    end: int

    def read(self) -> ChunkRequest:
        """Straight into host memory that takes the whole chunk as it is, else through scratch memory."""
        values = self.target.values
        in_memory = isinstance(values, torch.Tensor) and values.device.type == "cpu"
        if isinstance(values, torch.Tensor) and in_memory and values.dtype == self.dtype:
            destination = byte_view(values[self.begin : self.end])
            if destination.numel() == self.chunk.size:
                return ChunkRequest(self.chunk, destination)
        return ChunkRequest(self.chunk, None)

    def write(self, data: torch.Tensor, staging: DeviceStaging) -> None:
        """Move a chunk's bytes from scratch to where they belong, converting between float precisions; see
        :meth:`FillTarget.put`."""
        found = data.view(self.dtype)[self.skip : self.skip + self.end - self.begin]
        self.target.put(self.begin, found, staging)


def check_slice(state: TensorSlice) -> None:
    """TypeError or ValueError naming the slice unless it is a 1-D contiguous tensor or stored values."""
    where = f"{state.kind} of {state.name!r}"
    check_values(state.tensor, where)
    if type(state.start) is not int or state.start < 0:
        raise ValueError(
            f"{where}: start: expected an element offset of 0 or more, got {state.start!r}. Pass such a "
            "number."
        )


def plan_fills(manifest: Manifest, wanted: Iterable[FillTarget]) -> list[Fill]:
    """Return what to read for ``wanted``, in file order; ValueError names a slice that is not stored, or not
    so.
    """
    stored: Mapping[tuple[str, str], list[SliceRecord]] = _by_tensor(manifest)
    fills: list[Fill] = []
    for target in wanted:
        if target.numel == 0:
            continue
        records = stored.get((target.kind, target.name))
        if records is None:
            raise ValueError(
                f"{target.kind} of {target.name!r}: it is not in the checkpoint, which may be of another "
                "optimizer. Use the optimizer that it was saved with."
            )
        _check_fit(target, records)
        for record in records:
            fills.extend(_fills_of_slice(target, record, manifest.chunk_bytes))
    return sorted(fills, key=lambda fill: fill.chunk)


def _by_tensor(manifest: Manifest) -> Mapping[tuple[str, str], list[SliceRecord]]:
    stored: dict[tuple[str, str], list[SliceRecord]] = defaultdict(list)
    for record in manifest.slices:
        stored[record.kind, record.name].append(record)
    for records in stored.values():
        records.sort(key=lambda record: record.start)
    return stored


def _check_fit(target: FillTarget, records: list[SliceRecord]) -> None:
    elements = records[-1].start + records[-1].numel
    if target.start + target.numel > elements:
        raise ValueError(
            f"{target.kind} of {target.name!r}: expected elements {target.start} to "
            f"{target.start + target.numel}, got only the first {elements} in the checkpoint. Use the model "
            "and optimizer that it was saved with."
        )
    dtype = dtype_named(records[0].dtype)
    both_float = dtype.is_floating_point and target.values.dtype.is_floating_point
    if dtype != target.values.dtype and not both_float:
        raise ValueError(
            f"{target.kind} of {target.name!r}: expected {target.values.dtype}, got {dtype} in the "
            "checkpoint. Use the model and optimizer that it was saved with."
        )


def _fills_of_slice(target: FillTarget, record: SliceRecord, chunk_bytes: int) -> Iterator[Fill]:
    begin = max(target.start, record.start)
    end = min(target.start + target.numel, record.start + record.numel)
    if begin >= end:
        return
    dtype = dtype_named(record.dtype)
    chunk_elements = chunk_bytes // dtype.itemsize
    first = (begin - record.start) // chunk_elements
    last = (end - 1 - record.start) // chunk_elements
    for index, chunk in enumerate(slice_chunks(record, chunk_bytes, first, last + 1), first):
        chunk_start = record.start + index * chunk_elements
        low = max(begin, chunk_start)
        high = min(end, chunk_start + chunk.size // dtype.itemsize)
        yield Fill(chunk, dtype, low - chunk_start, target, low - target.start, high - target.start)
