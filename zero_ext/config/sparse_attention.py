"""Blocks of the attention matrix to compute, with the keys of DeepSpeed's `sparse_attention`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from zero_ext.config.base_section import ConfigSection, Count, KeyProblem, Positive, as_integer, as_tuple

BlockSize = Literal[16, 32, 64, 128]
BLOCK_SIZES: tuple[BlockSize, ...] = (16, 32, 64, 128)
AttentionBackend = Literal["kernel", "flex"]
LayoutMode = Literal["dense", "fixed", "variable", "bigbird", "bslongformer", "local_sliding_window"]
MOST_HEADS = 1 << 16

_GLOBAL_INDICES = ("global_block_indices", "global_block_end_indices")
MODE_KEYS: dict[LayoutMode, tuple[str, ...]] = {
    "dense": (),
    "fixed": (
        "different_layout_per_head",
        "num_local_blocks",
        "num_global_blocks",
        "horizontal_global_attention",
        "num_different_global_patterns",
    ),
    "variable": (
        "different_layout_per_head",
        "num_random_blocks",
        "local_window_blocks",
        *_GLOBAL_INDICES,
        "horizontal_global_attention",
        "seed",
    ),
    "bigbird": (
        "different_layout_per_head",
        "num_random_blocks",
        "num_sliding_window_blocks",
        "num_global_blocks",
        "seed",
    ),
    "bslongformer": ("different_layout_per_head", "num_sliding_window_blocks", *_GLOBAL_INDICES),
    "local_sliding_window": ("num_sliding_window_blocks",),
}
_EVERY_MODE = frozenset({"mode", "block", "attention", "backend"})

Counts = Annotated[tuple[Count, ...], BeforeValidator(as_tuple), Field(max_length=1 << 20)]
Windows = Annotated[tuple[Positive, ...], BeforeValidator(as_tuple), Field(min_length=1, max_length=1 << 20)]


class SparseAttentionConfig(ConfigSection):
    """A layout of blocks, for every sequence length.

    All counts and indices are in blocks. A key that the mode does not use must have its default.

    Source: Child et al. (arXiv 1904.10509); Zaheer et al. (arXiv 2007.14062); Beltagy et al. (arXiv
    2004.05150).

    Attributes:
        mode: sparsity pattern. "dense" computes every block, "fixed" computes adjacent windows and some
            blocks of each window to which all blocks attend, and "variable" computes windows of given sizes,
            given global blocks and random blocks. "bigbird" computes a sliding window, the first blocks as
            global ones and random blocks, "bslongformer" computes a sliding window and given global blocks,
            and "local_sliding_window" computes a sliding window only.
        block: side length of a block, in tokens.
        attention: direction of attention. "unidirectional" lets a token attend only to itself and to earlier
            tokens. `null` means "unidirectional" in mode local_sliding_window and "bidirectional" in the
            other modes, and always "bidirectional" in models of transformers, which mask later tokens
            themselves if they are causal.
        different_layout_per_head: whether the layout differs between heads. In mode fixed the heads cycle
            through the global patterns. In modes variable and bigbird each head draws its own random blocks.
        num_local_blocks: number of blocks per window in mode fixed.
        num_global_blocks: number of global blocks, to which all blocks attend. In mode fixed they are at the
            end of each window. In mode bigbird they are at the start of the sequence, and they attend to all
            blocks.
        horizontal_global_attention: whether global blocks also attend to all blocks, in modes fixed and
            variable. It requires bidirectional attention.
        num_different_global_patterns: number of global patterns in mode fixed, which are assigned to the
            heads in turn. The global blocks of each further pattern are closer to the start of their window.
            Values above 1 require different_layout_per_head.
        num_random_blocks: number of random blocks per row of blocks, in modes variable and bigbird. `null`
            means 0 in variable and 1 in bigbird.
        local_window_blocks: numbers of blocks of the first windows in mode variable. The last entry applies
            to all further windows.
        global_block_indices: indices of global blocks, to which all blocks attend, in modes variable and
            bslongformer. Indices beyond the end of a short sequence are left out.
        global_block_end_indices: exclusive ends of ranges of global blocks, in modes variable and
            bslongformer. Each entry belongs to the start at the same place in global_block_indices. `null`
            means that each index is a single block.
        num_sliding_window_blocks: width of the sliding window around a block, in blocks, in modes bigbird,
            bslongformer and local_sliding_window. Half of it, rounded down, is on either side of the block.
        seed: seed of the random blocks in modes variable and bigbird. The blocks are the same on every rank,
            and in a unidirectional layout for every sequence length.
        backend: implementation of attention. "kernel" uses the kernels of zero_ext. "flex" uses torch's
            FlexAttention in tiles of 128 tokens, without dropout, without the gradient of a bias and without
            backward on the CPU.
    """

    mode: LayoutMode = "fixed"
    block: Annotated[BlockSize, BeforeValidator(as_integer)] = 16
    attention: Literal["unidirectional", "bidirectional"] | None = None
    different_layout_per_head: bool = False
    num_local_blocks: Positive = 4
    num_global_blocks: Positive = 1
    horizontal_global_attention: bool = False
    num_different_global_patterns: Positive = 1
    num_random_blocks: Count | None = None
    local_window_blocks: Windows = (4,)
    global_block_indices: Counts = (0,)
    global_block_end_indices: Counts | None = None
    num_sliding_window_blocks: Positive = 3
    seed: Count = 0
    backend: AttentionBackend = "kernel"

    @property
    def unidirectional(self) -> bool:
        """Return whether tokens attend to none behind them."""
        if self.attention is None:
            return self.mode == "local_sliding_window"
        return self.attention == "unidirectional"

    def in_a_model(self) -> SparseAttentionConfig:
        """Return the policy for a model that itself hides later tokens if it is causal.

        Returns:
            The policy, bidirectional unless `attention` is given.
        """
        return self.replace(attention="bidirectional") if self.attention is None else self

    @property
    def random_blocks(self) -> int:
        """Random blocks of every row of blocks."""
        if self.num_random_blocks is None:
            return 1 if self.mode == "bigbird" else 0
        return self.num_random_blocks

    @property
    def global_ranges(self) -> tuple[tuple[int, int], ...]:
        """First block and end of each global range that is given by indices."""
        starts = self.global_block_indices
        ends = self.global_block_end_indices or tuple(start + 1 for start in starts)
        return tuple(zip(starts, ends, strict=True))

    def layout_heads(self, heads: int) -> int:
        """Return the number of layouts that `heads` heads have.

        Args:
            heads: query heads.

        Returns:
            1 for all of them, or `heads` where they differ.
        """
        turns = self.mode == "fixed" and self.num_different_global_patterns > 1
        draws = self.mode in ("variable", "bigbird") and self.random_blocks > 0
        return heads if self.different_layout_per_head and (turns or draws) else 1

    @model_validator(mode="after")
    def _only_keys_of_the_mode(self) -> SparseAttentionConfig:
        allowed = _EVERY_MODE | set(MODE_KEYS[self.mode])
        for name, field in type(self).model_fields.items():
            if name in allowed or getattr(self, name) == field.default:
                continue
            users = ", ".join(mode for mode, keys in MODE_KEYS.items() if name in keys)
            raise KeyProblem(name, f"it has no effect in mode {self.mode!r} (used by {users}). Remove it.")
        return self

    @model_validator(mode="after")
    def _global_blocks_are_consistent(self) -> SparseAttentionConfig:
        if self.mode == "fixed":
            self._check_fixed()
        if self.horizontal_global_attention and self.unidirectional:
            raise KeyProblem(
                "horizontal_global_attention",
                "expected false with attention 'unidirectional', where no block attends to all, got true. "
                "Set it to false.",
            )
        ends = self.global_block_end_indices
        if ends is not None:
            if len(ends) != len(self.global_block_indices):
                raise KeyProblem(
                    "global_block_end_indices",
                    f"expected {len(self.global_block_indices)} entries, as global_block_indices has, got "
                    f"{len(ends)}. "
                    "Give one end for each start.",
                )
            for index, (start, end) in enumerate(zip(self.global_block_indices, ends, strict=True)):
                if end <= start:
                    raise KeyProblem(
                        f"global_block_end_indices.{index}",
                        f"expected more than its start {start}, got {end}. Write the end as exclusive.",
                    )
        return self

    def _check_fixed(self) -> None:
        if self.num_local_blocks % self.num_global_blocks:
            raise KeyProblem(
                "num_global_blocks",
                f"expected a divisor of num_local_blocks ({self.num_local_blocks}), got "
                f"{self.num_global_blocks}. Set it to a divisor.",
            )
        patterns, most = self.num_different_global_patterns, self.num_local_blocks // self.num_global_blocks
        if patterns > most:
            raise KeyProblem(
                "num_different_global_patterns",
                f"expected at most num_local_blocks / num_global_blocks = {most}, got {patterns}. Lower it.",
            )
        if patterns > 1 and not self.different_layout_per_head:
            raise KeyProblem(
                "num_different_global_patterns",
                f"expected 1 where all heads share one layout, got {patterns}. Set "
                "different_layout_per_head to true.",
            )
