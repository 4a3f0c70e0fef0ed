"""Block-sparse attention: layouts of blocks, and the module that attends by them."""

from zero_ext.attention.block_layout import BlockLayout
from zero_ext.attention.layout import LayoutCache, build_layout

__all__ = ["BlockLayout", "LayoutCache", "build_layout"]
