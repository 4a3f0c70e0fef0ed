"""CRC32C, the checksum of checkpoint files."""

from __future__ import annotations

import torch
from torch import Tensor

from zero_ext.ops.load_library import fake_kernel, op


def crc32c(bytes: Tensor, seed: int = 0) -> int:
    """CRC32C of `bytes`, in [0, 2^32). The interpreter lock is released meanwhile.

    Args:
        bytes: uint8 [n], contiguous, on the CPU.
        seed: the checksum of the bytes before these; `crc32c(b, crc32c(a))` is that of a and b joined.

    Raises:
        RuntimeError: `bytes` has the wrong dtype, device or layout, or `seed` is out of range.

    Source: Castagnoli's polynomial as in RFC 3720, appendix B.4.
    """
    return op("crc32c")(bytes, seed)


@fake_kernel("crc32c")
def _crc32c(bytes: Tensor, seed: int) -> torch.SymInt:
    return torch.library.get_ctx().new_dynamic_size()
