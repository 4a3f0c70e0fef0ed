"""Block-sparse attention, and attention within the documents of packed sequences."""

from zero_ext.attention.block_layout import BlockLayout
from zero_ext.attention.layout_builder import LayoutCache, build_layout
from zero_ext.attention.packed_documents import document_attention, documents_from_positions
from zero_ext.attention.padding import extend_positions, pad_to_block, unpad
from zero_ext.attention.sparse_self_attention import SparseSelfAttention

__all__ = [
    "BlockLayout",
    "LayoutCache",
    "SparseSelfAttention",
    "build_layout",
    "document_attention",
    "documents_from_positions",
    "extend_positions",
    "pad_to_block",
    "unpad",
]
