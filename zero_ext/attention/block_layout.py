"""The blocks of the attention matrix that are computed, as compressed rows of block columns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from zero_ext.config.sparse_attention import BLOCK_SIZES

MOST_BLOCKS = (1 << 31) - 1  # offsets are int32
MOST_MASKED = 1 << 14  # longest side of a dense mask, which is for looking and for tests


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """The blocks that queries attend to, one layout for all heads or one for each.

    What is made here outlives the call that makes it, so under `torch.inference_mode` too it consists of
    tensors that a later backward may keep.

    Attributes:
        block: tokens of a block's side; the last row and column of blocks may be shorter.
        heads: layouts held: 1, shared by all heads, or as many as there are query heads.
        query_length: tokens of the queries.
        key_length: tokens of the keys.
        row_pointers: int32 [heads, row blocks + 1]; offsets into `columns`, over all heads.
        columns: int32 [blocks]; block columns, ascending within a row.

    Raises:
        ValueError: shapes, dtypes, offsets or columns are not as above. The numbers of tensors on other
            devices than the CPU are checked when `column_pointers` or `rows` is made, after a wait for them.
    """

    block: int
    heads: int
    query_length: int
    key_length: int
    row_pointers: torch.Tensor
    columns: torch.Tensor

    def __post_init__(self) -> None:
        check_block(self.block)
        for name in ("query_length", "key_length", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name}: expected at least 1, got {getattr(self, name)}. Pass the size of the scores."
                )
        wanted = (self.heads, self.row_blocks + 1)
        for name, shape in (("row_pointers", wanted), ("columns", (self.columns.numel(),))):
            tensor = getattr(self, name)
            if tensor.dtype != torch.int32 or tuple(tensor.shape) != shape or not tensor.is_contiguous():
                raise ValueError(
                    f"{name}: expected contiguous int32 of shape {shape}, got {tensor.dtype} of shape "
                    f"{tuple(tensor.shape)}. Convert it, or build the layout with "
                    "BlockLayout.from_block_mask."
                )
        if all(
            type(tensor) is torch.Tensor and tensor.is_cpu for tensor in (self.row_pointers, self.columns)
        ):
            _check_rows(self.row_pointers, self.columns, self.column_blocks)

    @property
    def row_blocks(self) -> int:
        """Rows of blocks."""
        return -(-self.query_length // self.block)

    @property
    def column_blocks(self) -> int:
        """Columns of blocks."""
        return -(-self.key_length // self.block)

    @property
    def blocks(self) -> int:
        """Blocks of all layouts in total."""
        return self.columns.numel()

    @property
    def density(self) -> float:
        """Fraction of all blocks that are present."""
        return self.blocks / (self.heads * self.row_blocks * self.column_blocks)

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.columns.device

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors, those of the transposed copy included."""
        pointers = self.heads * (self.row_blocks + self.column_blocks + 2)
        return 4 * (pointers + 2 * self.blocks)

    @property
    def column_pointers(self) -> torch.Tensor:
        """Offsets into `rows`, over all heads: int32 [heads, column blocks + 1]. Made at first use."""
        return self._transposed[0]

    @property
    def rows(self) -> torch.Tensor:
        """Block rows, ascending within a column: int32 [blocks]. Made at first use."""
        return self._transposed[1]

    @cached_property
    @torch._dynamo.disable
    @torch.inference_mode(False)
    def _transposed(self) -> tuple[torch.Tensor, torch.Tensor]:
        in_host = self.row_pointers.cpu(), self.columns.cpu()
        if not self.columns.is_cpu:
            _check_rows(*in_host, self.column_blocks)
        pointers, columns = (tensor.numpy() for tensor in in_host)
        # numpy sorts 16-bit keys by radix, which is several times faster.
        narrow = columns.astype(np.uint16) if self.column_blocks <= 1 << 16 else columns
        column_pointers = np.empty((self.heads, self.column_blocks + 1), dtype=np.int32)
        rows = np.empty_like(columns)
        for head in range(self.heads):
            start, stop = int(pointers[head, 0]), int(pointers[head, -1])
            order = np.argsort(narrow[start:stop], kind="stable")
            numbers = np.repeat(np.arange(self.row_blocks, dtype=np.int32), np.diff(pointers[head]))
            rows[start:stop] = numbers[order]
            counts = np.bincount(columns[start:stop], minlength=self.column_blocks)
            column_pointers[head, 0] = start
            column_pointers[head, 1:] = start + np.cumsum(counts)
        return tuple(torch.from_numpy(tensor).to(self.device) for tensor in (column_pointers, rows))  # type: ignore[return-value]

    @torch._dynamo.disable
    @torch.inference_mode(False)
    def to(self, device: torch.device | str) -> BlockLayout:
        """Return the same layout with its tensors on another device.

        Args:
            device: the device.

        Returns:
            A new layout; itself if its tensors are there.
        """
        if torch.device(device) == self.device:
            return self
        tensors = (self.row_pointers.to(device), self.columns.to(device))
        return BlockLayout(self.block, self.heads, self.query_length, self.key_length, *tensors)

    def block_mask(self) -> torch.Tensor:
        """Return the layout as a mask of blocks, for plots and tests.

        Returns:
            bool [heads, row blocks, column blocks] on the layout's device.

        Raises:
            ValueError: there are more than 16,384 rows or columns of blocks.
        """
        if max(self.row_blocks, self.column_blocks) > MOST_MASKED:
            raise ValueError(
                f"dense mask: expected at most {MOST_MASKED:,} blocks per side, got {self.row_blocks:,} × "
                f"{self.column_blocks:,}. Use row_pointers and columns."
            )
        mask = torch.zeros(self.heads, self.row_blocks, self.column_blocks, dtype=torch.bool, device="cpu")
        counts = self.row_pointers.cpu().diff(dim=1).flatten()
        rows = torch.arange(self.heads * self.row_blocks, device="cpu").repeat_interleave(counts)
        mask.view(-1, self.column_blocks)[rows, self.columns.cpu().long()] = True
        return mask.to(self.device)

    def dense_mask(self) -> torch.Tensor:
        """Return the layout as a mask of tokens, for plots and tests.

        Returns:
            bool [heads, query length, key length], True where a query's block holds a key's.

        Raises:
            ValueError: there are more than 16,384 queries or keys.
        """
        if max(self.query_length, self.key_length) > MOST_MASKED:
            raise ValueError(
                f"dense mask: expected at most {MOST_MASKED:,} tokens per side, got {self.query_length:,} × "
                f"{self.key_length:,}. Use row_pointers and columns."
            )
        wide = self.block_mask().repeat_interleave(self.block, 1).repeat_interleave(self.block, 2)
        return wide[:, : self.query_length, : self.key_length]

    @classmethod
    @torch.inference_mode(False)
    def from_block_mask(
        cls, mask: torch.Tensor, block: int, *, query_length: int | None = None, key_length: int | None = None
    ) -> BlockLayout:
        """Return a layout of the True entries of a mask.

        Rows may be empty: their queries get zeros.

        Args:
            mask: bool [rows, columns] or [heads, rows, columns] of blocks.
            block: tokens of a block's side.
            query_length: tokens; default full blocks.
            key_length: tokens; default full blocks.

        Returns:
            The layout, on the mask's device.

        Raises:
            ValueError: the mask has another dtype or shape or more than 2**31 - 1 blocks, or a length
                does not end in its last block.
        """
        if mask.dtype != torch.bool or mask.ndim not in (2, 3) or mask.numel() == 0:
            raise ValueError(
                "block mask: expected torch.bool of shape [rows, columns] or [heads, rows, columns], none "
                f"of them 0, got {mask.dtype} of shape {tuple(mask.shape)}. Convert it with mask.bool(), "
                "or reshape it."
            )
        check_block(block)
        mask = mask if mask.ndim == 3 else mask[None]
        heads, rows, columns = mask.shape
        lengths = (
            _length("query_length", query_length, rows, block),
            _length("key_length", key_length, columns, block),
        )
        pointers = torch.zeros(heads, rows + 1, dtype=torch.int64, device=mask.device)
        counts = mask.sum(dim=2)
        if int(counts.sum()) > MOST_BLOCKS:
            raise ValueError(
                f"block mask: expected at most {MOST_BLOCKS:,} blocks, got {int(counts.sum()):,}. Use larger "
                "blocks, or fewer of them."
            )
        starts = counts.sum(dim=1).cumsum(0) - counts.sum(dim=1)
        torch.cumsum(counts, dim=1, out=pointers[:, 1:])
        pointers += starts[:, None]
        found = mask.nonzero()[:, 2].to(torch.int32).contiguous()
        return cls(block, heads, *lengths, pointers.to(torch.int32), found)


def check_block(block: int) -> None:
    """Raise ValueError unless `block` is a size that the kernels have."""
    if block not in BLOCK_SIZES:
        raise ValueError(
            f"block: expected one of {', '.join(map(str, BLOCK_SIZES))}, got {block}. Choose one of them."
        )


def _check_rows(pointers: torch.Tensor, columns: torch.Tensor, column_blocks: int) -> None:
    """Raise ValueError unless the pointers cut all columns into rows that ascend below `column_blocks`."""
    ends = pointers.flatten()
    blocks = columns.numel()
    if int(ends[0]) != 0 or int(ends[-1]) != blocks or bool((ends[1:] < ends[:-1]).any()):
        raise ValueError(
            f"row_pointers: expected ascending offsets from 0 to {blocks}, the number of columns, got "
            f"offsets from {int(ends[0])} to {int(ends[-1])}. Compute them as the cumulative sum of blocks "
            "per row."
        )
    if bool((pointers[1:, 0] != pointers[:-1, -1]).any()):
        raise ValueError(
            "row_pointers: expected those of a head to begin where those of the head before end, got a gap "
            "or an overlap. Compute them as one cumulative sum over all heads."
        )
    if blocks == 0:
        return
    least, most = (int(end) for end in columns.aminmax())
    if least < 0 or most >= column_blocks:
        raise ValueError(
            f"columns: expected values from 0 to {column_blocks - 1}, got {least} to {most}. Pass the "
            "indices of blocks."
        )
    fits = columns[1:] > columns[:-1]
    starts = ends[(ends > 0) & (ends < blocks)].long()
    fits[starts - 1] = True
    if not bool(fits.all()):
        raise ValueError(
            "columns: expected ascending values in every row, got others. Sort each row and drop duplicates."
        )


def _length(name: str, length: int | None, blocks: int, block: int) -> int:
    if length is None:
        return blocks * block
    if -(-length // block) != blocks:
        raise ValueError(
            f"{name}: expected a length of {blocks} blocks of {block}, which the block mask has, got "
            f"{length}, which needs {-(-length // block)}. Pass the length that the mask is for."
        )
    return length
