"""Names of the dtypes that checkpoints hold: torch's, safetensors' and their sizes."""

from __future__ import annotations

import torch

SAFETENSORS_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
SAFETENSORS_DTYPES = {code: dtype for dtype, code in SAFETENSORS_CODES.items()}
_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in SAFETENSORS_CODES}


def dtype_name(dtype: torch.dtype) -> str:
    """Torch's name without the module: ``float32``. ValueError for a dtype no checkpoint holds."""
    if dtype not in SAFETENSORS_CODES:
        raise ValueError(
            f"dtype: expected one that a checkpoint can store ({', '.join(_BY_NAME)}), got {dtype}. Convert "
            "to one of these."
        )
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype of a name; ValueError for a name no checkpoint holds."""
    if name not in _BY_NAME:
        raise ValueError(f"dtype: expected one of {', '.join(_BY_NAME)}, got {name!r}. Use one of these.")
    return _BY_NAME[name]
