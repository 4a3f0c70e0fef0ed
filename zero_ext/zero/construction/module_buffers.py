"""A model's buffers: state dict entries, device, dtype and the same values on all ranks."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from zero_ext.comm import Collectives
from zero_ext.zero.units.parameter_marks import move_packed, packed_tensors


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the live buffers of the state dict by all their names, and tensors attached to quantized
    parameters."""
    found: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return {**found, **packed_tensors(model)}


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move the buffers of a model to the device of its future units. Meta buffers stay."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)
    move_packed(model, device)


def cast_running_statistics(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the running statistics of batch and instance norms to ``dtype``: their kernels refuse a mixture.

    Other buffers keep their precision, which a rotary embedding's frequencies need.
    """
    for module in model.modules():
        if isinstance(module, _NormBase):
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    module._buffers[name] = buffer.to(dtype)


def broadcast_buffers(model: nn.Module, collectives: Collectives) -> None:
    """Broadcast rank 0's module buffers, and the tensors attached to quantized parameters."""
    for name, buffer in (*model.named_buffers(), *packed_tensors(model).items()):
        if buffer.numel() and not buffer.is_meta:
            value = buffer.data.contiguous()
            collectives.broadcast_(value.view(-1).view(torch.uint8), 0, f"buffer '{name}' from rank 0")
            # Then ``contiguous`` made a copy, and the copy has received the values.
            if value.data_ptr() != buffer.data_ptr():
                buffer.data.copy_(value)
