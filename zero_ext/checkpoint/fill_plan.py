"""The plan of a load: which bytes of which files fill which memory. Made and checked before reading."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

from zero_ext.checkpoint.chunk_reader import Chunk, Read, piece_chunks
from zero_ext.checkpoint.dtypes import dtype_named
from zero_ext.checkpoint.host_memory import byte_view
from zero_ext.checkpoint.manifest import Manifest, PieceRecord
from zero_ext.checkpoint.source import Piece


class Wanted(NamedTuple):
    """A run of a stored tensor to be filled, by the name it has in the checkpoint."""

    kind: str
    name: str
    start: int
    tensor: torch.Tensor


class Fill(NamedTuple):
    """Elements of one chunk, from ``skip`` on, that belong in ``destination`` (1-D; floats convert)."""

    chunk: Chunk
    dtype: torch.dtype
    skip: int
    destination: torch.Tensor

    def read(self) -> Read:
        """Straight into the destination where it takes the whole chunk as it is, else by way of scratch."""
        whole = self.destination.nbytes == self.chunk.size and self.destination.dtype == self.dtype
        return Read(self.chunk, byte_view(self.destination) if whole else None)

    def place(self, data: torch.Tensor) -> None:
        """Moves a chunk's bytes from scratch to the destination, converting between float precisions."""
        if data.data_ptr() != self.destination.data_ptr():
            values = data.view(self.dtype)[self.skip : self.skip + self.destination.numel()]
            self.destination.copy_(values)


def check_piece(piece: Piece) -> None:
    """TypeError or ValueError naming the piece unless it is a 1-D contiguous CPU tensor."""
    where = f"{piece.kind} of {piece.name!r}"
    tensor = piece.tensor
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{where}: got a {type(tensor).__name__}, wanted a tensor")
    if tensor.device.type != "cpu" or tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{where}: got a tensor of shape {tuple(tensor.shape)}, stride {tensor.stride()} "
            f"on {tensor.device}, wanted one dimension, contiguous, on the CPU"
        )
    if type(piece.start) is not int or piece.start < 0:
        raise ValueError(f"{where}: starts at {piece.start!r}, wanted an element offset of 0 or more")


def plan_fills(manifest: Manifest, wanted: Iterable[Wanted]) -> list[Fill]:
    """What to read for ``wanted``, in file order; ValueError names a run that is not stored, or not so."""
    stored: Mapping[tuple[str, str], list[PieceRecord]] = _by_tensor(manifest)
    fills: list[Fill] = []
    for run in wanted:
        if run.tensor.numel() == 0:
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
    if run.start + run.tensor.numel() > elements:
        raise ValueError(
            f"{run.kind} of {run.name!r}: elements {run.start} to {run.start + run.tensor.numel()} "
            f"are needed, the checkpoint holds {elements}"
        )
    dtype = dtype_named(pieces[0].dtype)
    both_float = dtype.is_floating_point and run.tensor.dtype.is_floating_point
    if dtype != run.tensor.dtype and not both_float:
        raise ValueError(f"{run.kind} of {run.name!r} is stored as {dtype} and needed as {run.tensor.dtype}")


def _fills_of(run: Wanted, piece: PieceRecord, chunk_bytes: int) -> Iterator[Fill]:
    begin = max(run.start, piece.start)
    end = min(run.start + run.tensor.numel(), piece.start + piece.numel)
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
        yield Fill(chunk, dtype, low - chunk_start, run.tensor[low - run.start : high - run.start])
