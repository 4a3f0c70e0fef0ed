"""Blocks of quantized moments and quantized payloads (Dettmers et al., arXiv 2110.02861), and of 1-bit
compression."""

BLOCK_ELEMENTS = 256
SIGN_BLOCK = 8192


def block_count(elements: int) -> int:
    """Return the number of blocks, and so of scales, of `elements` elements. The last one may be shorter."""
    return -(-elements // BLOCK_ELEMENTS)


def payload_bytes(elements: int, bits: int) -> int:
    """Return bytes of `elements` elements of `bits` bits, padded to 8, and one float32 scale per block."""
    return -(-elements // 8) * bits + 4 * block_count(elements)


def sign_payload_bytes(elements: int) -> int:
    """Return bytes of the message of `elements` signs, a multiple of 4: 1/32 of float32's and 0.05% of
    scales.
    """
    return 4 * (-(-elements // 32) + -(-elements // SIGN_BLOCK))
