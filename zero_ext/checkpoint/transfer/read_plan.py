"""The plan of a load: which bytes of which files fill which state. Made and checked before reading."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

from zero_ext.checkpoint.files.raw_buffers import byte_view
from zero_ext.checkpoint.format.dtypes import dtype_named
from zero_ext.checkpoint.format.manifest import Manifest, PieceRecord
from zero_ext.checkpoint.format.state_source import Piece, StoredValues
from zero_ext.checkpoint.transfer.chunk_reader import Chunk, Read, piece_chunks
from zero_ext.checkpoint.transfer.device_staging import DeviceStaging
from zero_ext.checkpoint.transfer.piece_io import check_values, element_count, write_stored


class Wanted(NamedTuple):
    """A run of a stored tensor to be filled, by the name it has in the checkpoint."""

    kind: str
    name: str
    start: int
    values: torch.Tensor | StoredValues

    @property
    def numel(self) -> int:
        """Elements to be filled."""
        return element_count(self.values)

    def put(self, begin: int, found: torch.Tensor, staging: DeviceStaging) -> None:
        """Fills the run's elements from ``begin`` on with ``found`` (1-D, host memory; floats convert).

        What lies on a device gets them through ``staging``. CheckpointError naming the run if its store
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
    """Elements of one chunk, from ``skip`` on, that belong in elements [begin, end) of ``run`` (floats
    convert)."""

    chunk: Chunk
    dtype: torch.dtype
    skip: int
    run: Wanted
    begin: int
    end: int

    def read(self) -> Read:
        """Straight into host memory that takes the whole chunk as it is, else by way of scratch."""
        values = self.run.values
        in_memory = isinstance(values, torch.Tensor) and values.device.type == "cpu"
        if isinstance(values, torch.Tensor) and in_memory and values.dtype == self.dtype:
            target = byte_view(values[self.begin : self.end])
            if target.numel() == self.chunk.size:
                return Read(self.chunk, target)
        return Read(self.chunk, None)

    def place(self, data: torch.Tensor, staging: DeviceStaging) -> None:
        """Moves a chunk's bytes from scratch to where they belong, converting between float precisions; see
        :meth:`Wanted.put`."""
        found = data.view(self.dtype)[self.skip : self.skip + self.end - self.begin]
        self.run.put(self.begin, found, staging)


def check_piece(piece: Piece) -> None:
    """TypeError or ValueError naming the piece unless it is a 1-D contiguous tensor or stored values."""
    where = f"{piece.kind} of {piece.name!r}"
    check_values(piece.tensor, where)
    if type(piece.start) is not int or piece.start < 0:
        raise ValueError(f"{where}: starts at {piece.start!r}, wanted an element offset of 0 or more")


def plan_fills(manifest: Manifest, wanted: Iterable[Wanted]) -> list[Fill]:
    """What to read for ``wanted``, in file order; ValueError names a run that is not stored, or not so."""
    stored: Mapping[tuple[str, str], list[PieceRecord]] = _by_tensor(manifest)
    fills: list[Fill] = []
    for run in wanted:
        if run.numel == 0:
            continue
        pieces = stored.get((run.kind, run.name))
        if pieces is None:
            raise ValueError(
                f"{run.kind} of {run.name!r} is not in the checkpoint; was it saved with another optimizer?"
            )
        _check_fit(run, pieces)
        for piece in pieces:
            fills.extend(_fills_of(run, piece, manifest.chunk_bytes))
    return sorted(fills, key=lambda fill: fill.chunk)


def _by_tensor(manifest: Manifest) -> Mapping[tuple[str, str], list[PieceRecord]]:
    stored: dict[tuple[str, str], list[PieceRecord]] = defaultdict(list)
    for piece in manifest.pieces:
        stored[piece.kind, piece.name].append(piece)
    for pieces in stored.values():
        pieces.sort(key=lambda piece: piece.start)
    return stored


def _check_fit(run: Wanted, pieces: list[PieceRecord]) -> None:
    elements = pieces[-1].start + pieces[-1].numel
    if run.start + run.numel > elements:
        raise ValueError(
            f"{run.kind} of {run.name!r}: elements {run.start} to {run.start + run.numel} "
            f"are needed, the checkpoint holds {elements}"
        )
    dtype = dtype_named(pieces[0].dtype)
    both_float = dtype.is_floating_point and run.values.dtype.is_floating_point
    if dtype != run.values.dtype and not both_float:
        raise ValueError(f"{run.kind} of {run.name!r} is stored as {dtype} and needed as {run.values.dtype}")


def _fills_of(run: Wanted, piece: PieceRecord, chunk_bytes: int) -> Iterator[Fill]:
    begin = max(run.start, piece.start)
    end = min(run.start + run.numel, piece.start + piece.numel)
    if begin >= end:
        return
    dtype = dtype_named(piece.dtype)
    chunk_elements = chunk_bytes // dtype.itemsize
    first = (begin - piece.start) // chunk_elements
    last = (end - 1 - piece.start) // chunk_elements
    for index, chunk in enumerate(piece_chunks(piece, chunk_bytes, first, last + 1), first):
        chunk_start = piece.start + index * chunk_elements
        low = max(begin, chunk_start)
        high = min(end, chunk_start + chunk.size // dtype.itemsize)
        yield Fill(chunk, dtype, low - chunk_start, run, low - run.start, high - run.start)
