"""The blocks of the attention matrix that are computed, by the keys of DeepSpeed's `sparse_attention`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from zero_ext.config.schema.base_section import (
    ConfigSection,
    Count,
    KeyProblem,
    Positive,
    as_integer,
    as_tuple,
)

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
    """A layout of blocks, for every length.

    All counts and indices are of blocks. A key that the mode does not use is refused unless it holds its
    default.

    Source: Child et al. (arXiv 1904.10509); Zaheer et al. (arXiv 2007.14062); Beltagy et al. (arXiv
    2004.05150).

    Attributes:
        mode: "dense" computes every block; "fixed": windows side by side, and some blocks of each that all
            attend to; "variable": windows of given sizes, given global blocks, random ones; "bigbird": a
            sliding window, the first blocks global, random ones; "bslongformer": a sliding window and given
            global blocks; "local_sliding_window": a sliding window alone.
        block: tokens of a block's side.
        attention: "unidirectional" attends to a token itself and those before it only; null is
            "unidirectional" in mode local_sliding_window and "bidirectional" in the others, and in models of
            transformers, which hide later tokens themselves where they are causal, always "bidirectional".
        different_layout_per_head: heads take turns with the global patterns (fixed), or each draws random
            blocks of its own (variable, bigbird).
        num_local_blocks: fixed: blocks of a window.
        num_global_blocks: fixed: blocks at the end of each window that all attend to; bigbird: blocks at the
            start that all attend to and that attend to all.
        horizontal_global_attention: fixed, variable: global blocks attend to all blocks too; bidirectional
            only.
        num_different_global_patterns: fixed: how many heads in turn take global blocks ever nearer to their
            window's start; wants different_layout_per_head.
        num_random_blocks: variable, bigbird: random blocks of every row of blocks; null is 0 in variable and
            1 in bigbird.
        local_window_blocks: variable: blocks of the first windows; the last entry holds for all others.
        global_block_indices: variable, bslongformer: blocks that all attend to; those beyond a short
            sequence are left out.
        global_block_end_indices: variable, bslongformer: makes each index the start of a range that ends
            before its entry here; null means single blocks.
        num_sliding_window_blocks: bigbird, bslongformer, local_sliding_window: width of the window around a
            block, half of them, rounded down, on either side.
        seed: variable, bigbird: of the random blocks, which are the same on every rank and for every length
            of a unidirectional layout.
        backend: "kernel" computes attention with this package's kernels; "flex" with torch's FlexAttention,
            in tiles of 128 tokens, without dropout, without the gradient of a bias, and without backward on
            the CPU.
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
