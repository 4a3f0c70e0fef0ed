"""The buffers of a model: which belong to its state, and where they are."""

from __future__ import annotations

import torch
from torch import nn

from zero_ext.zero.units.quantized_params import move_packed, packed_tensors


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that belong into a state dict, live, by every full name that it has for them, and the
    tensors without which quantised parameters mean nothing."""
    found: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return {**found, **packed_tensors(model)}


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Puts the buffers of a model whose parameters are yet to get a place where these will be; buffers on the
    meta device stay."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)
    move_packed(model, device)
