"""The module buffers that belong to a model's state."""

from __future__ import annotations

import torch
from torch import nn


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that belong into a state dict, live, by every full name that it has for them."""
    found: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found
