"""A reduced gradient that lives on NVMe between reduction and step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from zero_ext import ops
from zero_ext.config import Tier
from zero_ext.offload import STORAGE_ALIGNMENT, ShardHome, Tiers
from zero_ext.zero.gradients.nvme_shard_io import (
    Piece,
    PieceReader,
    PieceWriter,
    lend_piece,
    piece_bounds,
)
from zero_ext.zero.gradients.squared_norms import Squares
from zero_ext.zero.memory.pool import BufferPool


class StoredGradients:
    """A gradient [numel] in one extent of the store; a ``GradientHome``.

    The first of a step is written from the memory it was reduced in; further ones are added to it piece by
    piece. Writes go on after :meth:`take` until :meth:`settle`. A transfer that fails is kept as ``failure``
    and raised to nobody but readers: it happens on one rank, amid a backward pass of all.
    """

    tier: Tier = "nvme"
    alignment = STORAGE_ALIGNMENT
    is_late = False

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        accumulation_dtype: torch.dtype,
        pool: BufferPool,
        tiers: Tiers,
    ) -> None:
        self.valid = False
        self.failure: RuntimeError | None = None
        self._pool = pool
        # Room for the wider one is there from the start: a later micro-batch may be the first to need it.
        widest = max(dtype, accumulation_dtype, key=lambda each: each.itemsize)
        self._extent = tiers.stored_home(numel, widest)
        self._home = self._extent.seen_as(dtype)
        self._sums = self._extent.seen_as(accumulation_dtype)
        self._squares: Squares | None = None  # of the whole gradient, while they are known
        self._reader: PieceReader | None = None
        self._writer = PieceWriter(pool)

    @property
    def dtype(self) -> torch.dtype:
        """See :class:`GradientHome`."""
        return (self._home if self._reader is None else self._sums).dtype

    # -- keeping ------------------------------------------------------------------------------------------

    def begin(self, sums: bool = False) -> torch.Tensor | None:
        """See :class:`GradientHome`: none. What will be added to starts to be read. A failure is noted."""
        self.settle()
        with self._noting_failure():
            if self.valid:
                self._reader = PieceReader(self._home, 0, self._home.numel, self._pool)
        return None

    def landed(self) -> None:
        """See :class:`GradientHome`; refused, there is no memory to land in."""
        raise AssertionError("a gradient on NVMe comes by take")

    def take(self, buffer: torch.Tensor, dtype: torch.dtype) -> None:
        """See :class:`GradientHome`: it is on its way when this returns."""
        values = buffer.view(dtype)[: self._home.numel]
        self._squares = Squares()
        reader, self._reader = self._reader, None
        if not self.valid and dtype == self._sums.dtype:
            self._home = self._sums
        self.valid = True
        with self._noting_failure():
            if reader is not None:
                self._home = self._sums
                with contextlib.closing(reader):
                    for piece in reader:
                        self._keep(self._sum_of(piece, values))
            elif dtype != self._home.dtype:
                for first, count in piece_bounds(self._home, 0, self._home.numel):
                    piece = lend_piece(self._pool, self._home, first, count)
                    ops.pack_(piece.values, [values[first : first + count]], [0])
                    self._keep(piece)
            else:
                self._keep(Piece(0, buffer, values))
                return
        self._pool.give(buffer)

    def _sum_of(self, kept: Piece, values: torch.Tensor) -> Piece:
        """``kept``, in the dtype in which gradients add up, plus the ``values`` that belong there."""
        first, count = kept.first, kept.values.numel()
        total = kept
        if kept.values.dtype != self._home.dtype:
            total = lend_piece(self._pool, self._home, first, count)
            ops.pack_(total.values, [kept.values], [0])
            self._pool.give(kept.buffer)
        ops.accumulate_(total.values, [values[first : first + count]], [0])
        return total

    def _keep(self, piece: Piece) -> None:
        """Sends a piece of the gradient to the store; the norm is taken as long as it is at hand."""
        if self._squares is not None:
            self._squares.add(piece.values)
        self._writer.start(self._home, piece)

    def settle(self) -> None:
        """See :class:`GradientHome`: every write has ended and the pool has its memory back."""
        with self._noting_failure():
            self._writer.wait()

    @contextlib.contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self.failure = self.failure or error

    # -- reading ------------------------------------------------------------------------------------------

    def shard(self) -> ShardHome:
        """See :class:`GradientHome`."""
        return self._home

    def visit(self, begin: int, end: int) -> Iterator[torch.Tensor]:
        """See :class:`GradientHome`. Raises ``RuntimeError`` if they cannot be read."""
        self._finish()
        with contextlib.closing(PieceReader(self._home, begin, end, self._pool)) as reader:
            for piece in reader:
                try:
                    yield _inside(piece, begin, end)
                finally:
                    self._pool.give(piece.buffer)

    def change(self, begin: int, end: int, change: Callable[[torch.Tensor], object]) -> None:
        """See :class:`GradientHome`; a failure is noted."""
        self._squares = None
        with self._noting_failure():
            self._finish()
            with contextlib.closing(PieceReader(self._home, begin, end, self._pool)) as reader:
                for piece in reader:
                    change(_inside(piece, begin, end))
                    self._writer.start(self._home, piece)
            self._writer.wait()

    def add_squares(self, squares: Squares) -> None:
        """See :class:`GradientHome`; read only if they are not known since the gradient was written."""
        if self._squares is None:
            own = Squares()
            for part in self.visit(0, self._home.numel):
                own.add(part)
            self._squares = own
        squares.add_all(self._squares)

    def forget(self) -> None:
        """See :class:`GradientHome`; the extent stays, and so does the dtype."""
        self.settle()
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self.valid = False
        self.failure = None

    def held_bytes(self) -> int:
        """See :class:`GradientHome`: room in the store for the wider dtype."""
        return self._extent.padded_bytes(self._extent.numel)

    def _finish(self) -> None:
        """Ends the writes; raises what went wrong since the gradient was forgotten last."""
        self.settle()
        if self.failure is not None:
            raise self.failure


def _inside(piece: Piece, begin: int, end: int) -> torch.Tensor:
    """The elements of ``piece`` that lie in [begin, end)."""
    return piece.values[max(begin - piece.first, 0) : end - piece.first]
