"""Policies of sparse attention for property tests."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import strategies as st

from tests.attention.record_deepspeed_layouts import CLASSES, settings
from zero_ext.config.sparse_attention import SparseAttentionConfig

SEEDS = st.integers(0, (1 << 32) - 1)  # of torch's generator, which hypothesis does not repeat


@st.composite
def policies(draw: st.DrawFn, random_blocks: bool = False, **fixed: Any) -> SparseAttentionConfig:
    """Policies of every mode, or of those with random blocks alone; `fixed` settings hold where they may."""
    mode = draw(st.sampled_from(("variable", "bigbird") if random_blocks else tuple(CLASSES)))
    found = settings(mode, random.Random(draw(st.integers(0, 1 << 32)))) | fixed
    if found.get("attention") == "unidirectional":
        found.pop("horizontal_global_attention", None)
    if random_blocks:
        found |= {"num_random_blocks": draw(st.integers(1, 5)), "seed": draw(st.integers(0, 1 << 62))}
    block = draw(st.sampled_from((16, 32, 64, 128)))
    return SparseAttentionConfig.from_mapping({"mode": mode, "block": block, **found})
