"""Tensors that are assembled from tensors of files: blocks of elements, each with its strides in a file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# A permutation of single elements would need a block for each of them.
MOST_BLOCKS = 1 << 18


class UnsupportedConversion(Exception):
    """Values of files would have to be computed with, or moved in a pattern that blocks do not express."""


class Block(NamedTuple):
    """Elements ``origin`` to ``origin + shape`` of a tensor. They are elements of the tensor ``key`` of the
    files, from element ``first`` of it on, with ``strides`` in elements of it."""

    origin: tuple[int, ...]
    shape: tuple[int, ...]
    key: str
    first: int
    strides: tuple[int, ...]

    def within(self, origin: Sequence[int], shape: Sequence[int]) -> Block | None:
        """Return the elements of this block in the box from ``origin`` on of ``shape``, None for none."""
        begins = [max(own, other) for own, other in zip(self.origin, origin, strict=True)]
        ends = [
            min(own + length, other + most)
            for own, length, other, most in zip(self.origin, self.shape, origin, shape, strict=True)
        ]
        lengths = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        if any(length <= 0 for length in lengths):
            return None
        first = self.first + sum(
            (begin - own) * stride
            for begin, own, stride in zip(begins, self.origin, self.strides, strict=True)
        )
        return Block(tuple(begins), lengths, self.key, first, self.strides)


class BlockMap(NamedTuple):
    """A tensor of ``shape``, covered by ``blocks`` that do not overlap."""

    shape: tuple[int, ...]
    blocks: tuple[Block, ...]

    @classmethod
    def stored(cls, key: str, shape: Sequence[int]) -> BlockMap:
        """Return the tensor ``key`` of the files as it is."""
        shape = tuple(shape)
        strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        block = Block((0,) * len(shape), shape, key, 0, strides)
        return cls(shape, (block,))

    @property
    def keys(self) -> list[str]:
        """The tensors of the files, each once."""
        return list(dict.fromkeys(block.key for block in self.blocks))

    def permuted(self, order: Sequence[int]) -> BlockMap:
        """Return the tensor with its dimensions in ``order``."""

        def reorder(values: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(values[dim] for dim in order)

        return BlockMap(
            reorder(self.shape),
            tuple(
                block._replace(
                    origin=reorder(block.origin),
                    shape=reorder(block.shape),
                    strides=reorder(block.strides),
                )
                for block in self.blocks
            ),
        )

    def narrowed(self, dim: int, begin: int, length: int) -> BlockMap:
        """Return ``length`` indexes of ``dim`` from ``begin`` on."""
        origin = [begin if each == dim else 0 for each in range(len(self.shape))]
        shape = tuple(length if each == dim else size for each, size in enumerate(self.shape))
        cut = (block.within(origin, shape) for block in self.blocks)
        return BlockMap(shape, tuple(_moved(block, dim, -begin) for block in cut if block is not None))

    @classmethod
    def concatenated(cls, maps: Sequence[BlockMap], dim: int) -> BlockMap:
        """Return tensors one after another along ``dim``."""
        blocks: list[Block] = []
        begin = 0
        for each in maps:
            blocks += (_moved(block, dim, begin) for block in each.blocks)
            begin += each.shape[dim]
        shape = (*maps[0].shape[:dim], begin, *maps[0].shape[dim + 1 :])
        return cls(shape, _limited(blocks))

    def reshaped(self, shape: Sequence[int]) -> BlockMap:
        """Return the elements, in row-major order, as a tensor of ``shape``.

        UnsupportedConversion if blocks do not become blocks by it.
        """
        shape = tuple(shape)
        if 0 in shape:
            return BlockMap(shape, ())
        target = [size for size in shape if size > 1]
        used = [dim for dim, size in enumerate(self.shape) if size > 1]
        sizes = [self.shape[dim] for dim in used]
        blocks = [_with_dimensions(block, used) for block in self.blocks]
        dim = 0
        while sizes != target:
            if sizes[dim] == target[dim]:
                dim += 1
            elif sizes[dim] % target[dim] == 0:
                inner = sizes[dim] // target[dim]
                blocks = [_split(block, dim, inner) for block in blocks]
                sizes[dim : dim + 1] = [target[dim], inner]
            else:
                inner = sizes.pop(dim + 1)
                sizes[dim] *= inner
                blocks = list(_limited([each for block in blocks for each in _merged(block, dim, inner)]))
        positions = [dim for dim, size in enumerate(shape) if size > 1]
        return BlockMap(shape, tuple(_spread(block, positions, len(shape)) for block in blocks))


def boxes(shape: Sequence[int], begin: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield origin and shape of the boxes that elements ``begin`` to ``end`` of a row-major tensor fill."""
    if begin >= end:
        return
    if not shape:
        yield (), ()
        return
    inner = math.prod(shape[1:])
    row, last = begin // inner, (end - 1) // inner
    if row == last:
        for origin, size in boxes(shape[1:], begin - row * inner, end - row * inner):
            yield (row, *origin), (1, *size)
        return
    if begin % inner:
        yield from boxes(shape, begin, (row + 1) * inner)
        row += 1
    rows = end // inner - row
    if rows:
        yield (row, *(0 for _ in shape[1:])), (rows, *shape[1:])
    yield from boxes(shape, (row + rows) * inner, end)


def _limited(blocks: Sequence[Block]) -> tuple[Block, ...]:
    if len(blocks) > MOST_BLOCKS:
        raise UnsupportedConversion(
            f"conversion: expected at most {MOST_BLOCKS} blocks of elements, got {len(blocks)}. Load the "
            "weights in full."
        )
    return tuple(blocks)


def _moved(block: Block, dim: int, distance: int) -> Block:
    origin = (*block.origin[:dim], block.origin[dim] + distance, *block.origin[dim + 1 :])
    return block._replace(origin=origin)


def _with_dimensions(block: Block, dims: Sequence[int]) -> Block:
    """Return ``block`` with ``dims`` alone; of the others there is one index."""
    origin, shape, strides = (
        tuple(each[dim] for dim in dims) for each in (block.origin, block.shape, block.strides)
    )
    return Block(origin, shape, block.key, block.first, strides)


def _spread(block: Block, positions: Sequence[int], count: int) -> Block:
    """Return ``block`` with its dimensions at ``positions`` of ``count``, and others of one index."""
    origin, shape, strides = [0] * count, [1] * count, [0] * count
    for dim, position in enumerate(positions):
        origin[position], shape[position] = block.origin[dim], block.shape[dim]
        strides[position] = block.strides[dim]
    return Block(tuple(origin), tuple(shape), block.key, block.first, tuple(strides))


def _split(block: Block, dim: int, inner: int) -> Block:
    """Return ``block`` with ``dim`` as two dimensions. The second has ``inner`` indexes."""
    begin, length, stride = block.origin[dim], block.shape[dim], block.strides[dim]
    row, column = divmod(begin, inner)
    if column == 0 and length % inner == 0:
        rows, columns = length // inner, inner
    elif column + length <= inner:
        rows, columns = 1, length
    else:
        raise UnsupportedConversion(
            f"conversion: expected full rows of {inner} elements of {block.key!r}, got some. Load the "
            "weights in full."
        )
    return Block(
        (*block.origin[:dim], row, column, *block.origin[dim + 1 :]),
        (*block.shape[:dim], rows, columns, *block.shape[dim + 1 :]),
        block.key,
        block.first,
        (*block.strides[:dim], stride * inner, stride, *block.strides[dim + 1 :]),
    )


def _merged(block: Block, dim: int, inner: int) -> list[Block]:
    """Return ``block`` with ``dim`` and the next one, of ``inner`` indexes, as one dimension."""
    (row, column), (rows, columns) = block.origin[dim : dim + 2], block.shape[dim : dim + 2]
    outer_stride, stride = block.strides[dim : dim + 2]
    one_stride = columns == inner and outer_stride == stride * inner
    count, length = (1, rows * columns) if one_stride or rows == 1 else (rows, columns)
    return [
        Block(
            (*block.origin[:dim], (row + index) * inner + column, *block.origin[dim + 2 :]),
            (*block.shape[:dim], length, *block.shape[dim + 2 :]),
            block.key,
            block.first + index * outer_stride,
            (*block.strides[:dim], stride, *block.strides[dim + 2 :]),
        )
        for index in range(count)
    ]
