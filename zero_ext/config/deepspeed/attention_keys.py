"""DeepSpeed's `sparse_attention` section, which DeepSpeed 0.15.4 had and 0.19 refuses."""

from __future__ import annotations

from zero_ext.config.base_section import is_number
from zero_ext.config.sparse_attention import BLOCK_SIZES, MODE_KEYS

from .key import FLAG, Key, ValueType, choice, integer, or_null

SECTION = "sparse_attention"
_COUNTS = ValueType(
    "a list of integers of at least 0",
    lambda value: isinstance(value, list) and all(is_number(v) and v == int(v) and v >= 0 for v in value),
)
_BLOCK = ValueType("16, 32, 64 or 128", lambda value: is_number(value) and value in BLOCK_SIZES)
_KINDS: dict[str, tuple[ValueType, str]] = {
    "mode": (
        choice(*MODE_KEYS),
        "sparsity pattern. The default is 'fixed' if other keys of the section are set",
    ),
    "block": (_BLOCK, "side length of a block, in tokens. Sequence lengths need not be multiples of it"),
    "attention": (
        choice("unidirectional", "bidirectional"),
        "direction of attention, in every mode. The value unidirectional also masks later tokens inside "
        "blocks",
    ),
    "different_layout_per_head": (
        FLAG,
        "whether the layout differs between heads. Heads with the same layout share its storage",
    ),
    "num_local_blocks": (integer(1), "number of blocks per window, in mode fixed"),
    "num_global_blocks": (integer(1), "number of global blocks, in modes fixed and bigbird"),
    "horizontal_global_attention": (
        FLAG,
        "whether global blocks also attend to all blocks, in modes fixed and variable",
    ),
    "num_different_global_patterns": (integer(1), "number of global patterns, in mode fixed"),
    "num_random_blocks": (
        integer(0),
        "number of random blocks per row, in modes variable and bigbird. The default is 0",
    ),
    "local_window_blocks": (_COUNTS, "numbers of blocks of the first windows, in mode variable"),
    "global_block_indices": (_COUNTS, "indices of global blocks, in modes variable and bslongformer"),
    "global_block_end_indices": (
        or_null(_COUNTS),
        "exclusive ends of ranges of global blocks, in modes variable and bslongformer",
    ),
    "num_sliding_window_blocks": (
        integer(1),
        "width of the sliding window in blocks, in modes bigbird, bslongformer and local_sliding_window",
    ),
}

ATTENTION_KEYS = tuple(
    Key(f"{SECTION}.{name}", kind, "supported", why) for name, (kind, why) in _KINDS.items()
)
