"""The codes that parameters and gradients travel in."""

from __future__ import annotations

from zero_ext import ops
from zero_ext.config.quantization_blocks import BLOCK_ELEMENTS
from zero_ext.config.sections.communication import CODE_BITS, CodeDtype


def format_of(codes: CodeDtype | None) -> ops.BlockFormat | None:
    """Symmetric codes, so that zero stays zero; None for none."""
    return None if codes is None else ops.BlockFormat(CODE_BITS[codes], True, BLOCK_ELEMENTS)
