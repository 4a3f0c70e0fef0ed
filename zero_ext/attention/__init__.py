"""Block-sparse attention: layouts of blocks, and the module that attends by them."""

from zero_ext.attention.block_layout import BlockLayout
from zero_ext.attention.layout_builder import LayoutCache, build_layout
from zero_ext.attention.padding import extend_positions, pad_to_block, unpad
from zero_ext.attention.sparse_self_attention import SparseSelfAttention

__all__ = [
    "BlockLayout",
    "LayoutCache",
    "SparseSelfAttention",
    "build_layout",
    "extend_positions",
    "pad_to_block",
    "unpad",
]
