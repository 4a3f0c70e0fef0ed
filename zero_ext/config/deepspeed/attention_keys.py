"""DeepSpeed's `sparse_attention` section, which DeepSpeed 0.15.4 had and 0.19 refuses."""

from __future__ import annotations

from zero_ext.config.schema.number_checks import is_number
from zero_ext.config.sections.sparse_attention import BLOCK_SIZES, MODE_KEYS

from .key import FLAG, Key, ValueType, choice, integer, or_null

SECTION = "sparse_attention"
_COUNTS = ValueType(
    "a list of integers of at least 0",
    lambda value: isinstance(value, list) and all(is_number(v) and v == int(v) and v >= 0 for v in value),
)
_BLOCK = ValueType("16, 32, 64 or 128", lambda value: is_number(value) and value in BLOCK_SIZES)
_KINDS: dict[str, tuple[ValueType, str]] = {
    "mode": (choice(*MODE_KEYS), "'fixed' when that is missing and other keys are given"),
    "block": (_BLOCK, "sequences need not be whole blocks"),
    "attention": (
        choice("unidirectional", "bidirectional"),
        "in every mode; unidirectional hides later tokens within blocks too",
    ),
    "different_layout_per_head": (FLAG, "layouts are stored once where heads are alike"),
    "num_local_blocks": (integer(1), "in mode fixed"),
    "num_global_blocks": (integer(1), "in modes fixed and bigbird"),
    "horizontal_global_attention": (FLAG, "in modes fixed and variable"),
    "num_different_global_patterns": (integer(1), "in mode fixed"),
    "num_random_blocks": (integer(0), "in modes variable and bigbird; 0 when missing"),
    "local_window_blocks": (_COUNTS, "in mode variable"),
    "global_block_indices": (_COUNTS, "in modes variable and bslongformer"),
    "global_block_end_indices": (or_null(_COUNTS), "in modes variable and bslongformer"),
    "num_sliding_window_blocks": (integer(1), "in modes bigbird, bslongformer and local_sliding_window"),
}

ATTENTION_KEYS = tuple(
    Key(f"{SECTION}.{name}", kind, "supported", why) for name, (kind, why) in _KINDS.items()
)
