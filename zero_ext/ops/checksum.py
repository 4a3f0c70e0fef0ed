"""CRC32C, the checksum of checkpoint files (Castagnoli polynomial, RFC 3720 appendix B.4)."""

from __future__ import annotations

import torch

from zero_ext.ops.library import fake_kernel, op


@fake_kernel("crc32c")
def _crc32c_fake(bytes: torch.Tensor, seed: int) -> torch.SymInt:
    return torch.library.get_ctx().new_dynamic_size()


def crc32c(bytes: torch.Tensor, seed: int = 0) -> int:
    """CRC32C of ``bytes`` (uint8 [n], CPU, contiguous), in [0, 2^32).

    ``seed`` is the checksum of the bytes before them, so ``crc32c(b, crc32c(a))`` is the checksum of a and b
    joined. RuntimeError names the argument for another dtype, device or layout, or a seed out of range. The
    interpreter lock is released meanwhile.
    """
    return op("crc32c")(bytes, seed)
