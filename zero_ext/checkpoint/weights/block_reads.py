"""Reads of files that fill a range of a tensor, with its blocks where they belong."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch

from zero_ext.checkpoint.chunk_reader import Chunk
from zero_ext.checkpoint.format.tensor_files import WeightFiles, row_major
from zero_ext.checkpoint.weights.block_map import Block, BlockMap, boxes

READ_BYTES = 2 << 20
# Shorter runs are read together with the gaps between them: a request costs as much as this many bytes.
_SHORT_RUN_BYTES = 64 << 10
# Elements that are assembled before they are stored, unless one index of the first dimension has more.
_ASSEMBLED_ELEMENTS = 1 << 19


class BlockCopy(NamedTuple):
    """Elements [shape] with ``strides`` in the ``chunk`` of a file, which has elements of ``dtype``. They go
    to ``target_strides`` from element ``begin`` of a range on."""

    chunk: Chunk
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    begin: int
    target_strides: tuple[int, ...]


class RangeRead(NamedTuple):
    """The copies that fill ``numel`` elements from ``begin`` on, in the order of the files."""

    begin: int
    numel: int
    copies: tuple[BlockCopy, ...]

    def values(self, data: Iterator[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Return the elements [numel] from the bytes of the chunks, which come next in ``data``.

        They are valid until the next chunk is read, and of ``dtype`` if several chunks are assembled.
        """
        if len(self.copies) == 1 and self.copies[0].strides == self.copies[0].target_strides:
            return next(data).view(self.copies[0].dtype)
        assembled = torch.empty(self.numel, dtype=dtype, device="cpu")
        for copy in self.copies:
            stored = next(data).view(copy.dtype).as_strided(copy.shape, copy.strides)
            assembled.as_strided(copy.shape, copy.target_strides, copy.begin).copy_(stored)
        return assembled


def plan_reads(files: WeightFiles, tensor: BlockMap, start: int, numel: int) -> list[RangeRead]:
    """Return the reads of elements ``start`` to ``start + numel`` of ``tensor``; they count from ``start``.

    What is in one run in a file is read by runs. Of other blocks, as transposed ones are, one index of the
    first dimension (an expert) is assembled in memory, or several small ones. A tensor of up to two
    dimensions is assembled in full, as far as it is in the range.
    """
    end = start + numel
    cut = _Cut(files, tensor)
    regions = cut.regions(start, end)
    if all(region.is_run for region in regions):
        runs = [run for region in regions for run in region.bounded(READ_BYTES)]
        return [RangeRead(run.begin - start, run.shape[-1], (run.copy(files, run.begin),)) for run in runs]
    step = cut.assembled_elements(numel)
    reads = []
    for first in range(start // step * step, end, step):
        begin, stop = max(first, start), min(first + step, end)
        bounded = [each for region in cut.regions(begin, stop) for each in region.bounded(READ_BYTES)]
        copies = sorted((each.copy(files, begin) for each in bounded), key=lambda copy: copy.chunk[:2])
        reads.append(RangeRead(begin - start, stop - begin, tuple(copies)))
    return reads


class _Region(NamedTuple):
    """Elements of one tensor of the files, from ``first`` of it on, that go to a tensor from its element
    ``begin`` on. The dimensions are those that neither side has in one run with the next."""

    key: str
    itemsize: int
    first: int
    begin: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    target_strides: tuple[int, ...]

    @property
    def is_run(self) -> bool:
        """True if the elements follow one another on both sides."""
        return self.strides == self.target_strides == (1,)

    @property
    def span(self) -> int:
        """Return the elements of the file from the first to the last."""
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    def runs(self) -> Iterator[_Region]:
        """Yield the runs of this region if they are long, else the region."""
        long = self.shape[-1] * self.itemsize >= _SHORT_RUN_BYTES
        if self.is_run or not long or (self.strides[-1], self.target_strides[-1]) != (1, 1):
            yield self
            return
        for indexes in product(*map(range, self.shape[:-1])):
            yield self._replace(
                first=self.first + _dot(indexes, self.strides[:-1]),
                begin=self.begin + _dot(indexes, self.target_strides[:-1]),
                shape=self.shape[-1:],
                strides=(1,),
                target_strides=(1,),
            )

    def bounded(self, nbytes: int) -> Iterator[_Region]:
        """Yield regions with spans of at most ``nbytes``, or of one element."""
        if self.span * self.itemsize <= nbytes:
            yield self
            return
        dim = max(range(len(self.shape)), key=lambda each: (self.shape[each] > 1, self.strides[each]))
        inner = self.span - (self.shape[dim] - 1) * self.strides[dim]
        count = max(1, 1 + (nbytes // self.itemsize - inner) // self.strides[dim])
        for index in range(0, self.shape[dim], count):
            size = min(count, self.shape[dim] - index)
            yield from self._replace(
                first=self.first + index * self.strides[dim],
                begin=self.begin + index * self.target_strides[dim],
                shape=(*self.shape[:dim], size, *self.shape[dim + 1 :]),
            ).bounded(nbytes)

    def copy(self, files: WeightFiles, origin: int) -> BlockCopy:
        """Return the copy to a range that begins with element ``origin`` of the tensor."""
        file, (entry, offset) = files.tensors[self.key]
        chunk = Chunk(
            file, offset + self.first * self.itemsize, self.span * self.itemsize, None, repr(self.key)
        )
        begin = self.begin - origin
        return BlockCopy(chunk, entry.dtype, self.shape, self.strides, begin, self.target_strides)


class _Cut:
    """The blocks of a tensor, to be cut into the regions of ranges."""

    def __init__(self, files: WeightFiles, tensor: BlockMap) -> None:
        self._files, self._shape = files, tensor.shape
        self._strides = row_major(tensor.shape)
        self._blocks = sorted(tensor.blocks, key=lambda block: block.origin)
        self._begins = [block.origin[:1] for block in self._blocks]
        self._tallest = max((block.shape[0] for block in tensor.blocks if block.shape), default=0)

    def regions(self, begin: int, end: int) -> list[_Region]:
        """Return the regions of elements ``begin`` to ``end``."""
        return [
            run
            for origin, shape in boxes(self._shape, begin, end)
            for block in self._near(origin, shape)
            for found in [block.within(origin, shape)]
            if found is not None
            for run in self._region(found).runs()
        ]

    def assembled_elements(self, numel: int) -> int:
        """Return how many elements are assembled in memory of ``numel`` that a rank needs."""
        rows = len(self._shape) > 2 and all(
            block.shape[0] == 1 or block.strides[0] >= max(block.strides[1:]) for block in self._blocks
        )
        if not rows:
            return max(self._strides[0] * self._shape[0], numel)
        return self._strides[0] * max(1, _ASSEMBLED_ELEMENTS // self._strides[0])

    def _near(self, origin: Sequence[int], shape: Sequence[int]) -> list[Block]:
        """Return the blocks that may overlap a box: those that begin at most ``_tallest`` before it."""
        if not origin:
            return self._blocks
        first = bisect_left(self._begins, (origin[0] - self._tallest + 1,))
        return self._blocks[first : bisect_left(self._begins, (origin[0] + shape[0],))]

    def _region(self, block: Block) -> _Region:
        shape, strides, targets = [1], [1], [1]
        for dim in reversed(range(len(block.shape))):
            size, stride, target = block.shape[dim], block.strides[dim], self._strides[dim]
            if size == 1:
                continue
            if shape[0] == 1:
                shape[0], strides[0], targets[0] = size, stride, target
            elif (stride, target) == (shape[0] * strides[0], shape[0] * targets[0]):
                shape[0] *= size
            else:
                shape.insert(0, size)
                strides.insert(0, stride)
                targets.insert(0, target)
        begin = _dot(block.origin, self._strides)
        itemsize = self._files.tensors[block.key][1].entry.dtype.itemsize
        return _Region(block.key, itemsize, block.first, begin, tuple(shape), tuple(strides), tuple(targets))


def _dot(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(map(int.__mul__, one, other))
