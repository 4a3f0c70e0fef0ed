"""The blocks that 8-bit moments are quantized in (Dettmers et al., arXiv 2110.02861)."""

BLOCK_ELEMENTS = 256


def block_count(elements: int) -> int:
    """Blocks, and so scales, of `elements` elements; the last block may be shorter."""
    return -(-elements // BLOCK_ELEMENTS)
