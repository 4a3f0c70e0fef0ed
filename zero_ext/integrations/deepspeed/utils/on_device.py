"""``OnDevice``: build a model in a dtype on a device, "meta" among them."""

from __future__ import annotations

from types import TracebackType

import torch

from zero_ext.integrations.deepspeed.refused import names_of


class OnDevice:
    """Inside the block modules and tensors are made on ``device``, floating-point ones in ``dtype``."""

    def __init__(self, dtype: torch.dtype, device: str = "meta", enabled: bool = True) -> None:
        self._dtype = dtype
        self._device = torch.device(device)
        self._enabled = enabled
        self._before = torch.get_default_dtype()

    def __enter__(self) -> OnDevice:
        if self._enabled:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self._dtype)
            self._device.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._enabled:
            self._device.__exit__(kind, error, trace)
            torch.set_default_dtype(self._before)


__getattr__ = names_of("deepspeed.utils.init_on_device")
