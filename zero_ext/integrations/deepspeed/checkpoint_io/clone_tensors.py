"""``deepspeed.checkpoint.utils``: state dicts with tensors that own exactly their memory."""

from __future__ import annotations

from typing import Any

import torch

from zero_ext.integrations.deepspeed.unsupported import names_of


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """``item`` with every tensor in it, through lists, tuples and dicts, copied to ``device``."""
    if isinstance(item, torch.Tensor):
        return item.detach().to(device, copy=True)
    if isinstance(item, list | tuple):
        return type(item)(clone_tensors_for_torch_save(each, device) for each in item)
    if isinstance(item, dict):
        return type(item)((key, clone_tensors_for_torch_save(each, device)) for key, each in item.items())
    return item


__getattr__ = names_of("deepspeed.checkpoint.utils")
