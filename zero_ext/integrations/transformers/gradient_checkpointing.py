"""Models of transformers that checkpoint their own layers: where these keep their inputs."""

from __future__ import annotations

from typing import Any

from torch import nn

from zero_ext.activation import checkpoint_activations
from zero_ext.config import ActivationCheckpointingConfig
from zero_ext.zero.api.engine_lookup import engine_of


def checkpoint_by_configuration(model: nn.Module) -> None:
    """Has the layers of a prepared ``model`` that checkpoint themselves, which ``gradient_checkpointing`` of
    the training arguments turns on, do it as ``activation_checkpointing`` of its configuration says. Without
    that section they stay as they are."""
    if engine_of(model).config.activation_checkpointing == ActivationCheckpointingConfig():
        return
    layer: Any  # torch's stubs let modules have tensors and modules alone
    for layer in model.modules():
        if hasattr(layer, "_gradient_checkpointing_func"):
            layer._gradient_checkpointing_func = checkpoint_activations
