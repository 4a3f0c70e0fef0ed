"""``OnDevice``: build a model in a dtype on a device, "meta" among them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from zero_ext.integrations.deepspeed.unsupported import names_of


@contextlib.contextmanager
def OnDevice(dtype: torch.dtype, device: str = "meta", enabled: bool = True) -> Iterator[None]:
    """Inside the block modules and tensors are made on ``device``, floating-point ones in ``dtype``."""
    before = torch.get_default_dtype()
    with torch.device(device) if enabled else contextlib.nullcontext():
        try:
            torch.set_default_dtype(dtype if enabled else before)
            yield
        finally:
            torch.set_default_dtype(before)


__getattr__ = names_of("deepspeed.utils.init_on_device")
