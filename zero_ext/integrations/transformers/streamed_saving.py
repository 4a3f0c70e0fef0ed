"""``save_pretrained`` of a sharded model that writes its weights a tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from zero_ext.checkpoint.weights.save_weights import MOST_BYTES, write_full_weights
from zero_ext.zero.api.engine_lookup import checkpoint_sources, engine_of
from zero_ext.zero.api.engine_state import ModelParallelState
from zero_ext.zero.api.full_parameters import full_sources


def can_stream(model: nn.Module) -> bool:
    """Return whether the weights of a sharded ``model`` can be written a tensor at a time: each tensor of the
    files is made of one of the model's. Quantized weights and slices of models are not."""
    if isinstance(checkpoint_sources(engine_of(model)).full, ModelParallelState):
        return False
    if not isinstance(model, PreTrainedModel):
        return True
    if getattr(model, "hf_quantizer", None) is not None or getattr(model, "_hf_peft_config_loaded", False):
        return False
    tensors = {
        each.names[0]: torch.empty(each.shape, dtype=each.parameters[0].dtype, device="meta")
        for each in full_sources(engine_of(model))
    }
    together = _kinds(revert_weight_conversion(model, dict(tensors)))
    alone: dict[str, tuple[torch.Size, torch.dtype]] = {}
    for name, value in tensors.items():
        alone |= _kinds(revert_weight_conversion(model, {name: value}))
    return alone == together


def _kinds(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (value.shape, value.dtype) for name, value in tensors.items()}


def write_weights_of(model: nn.Module, folder: Path, writes: bool, most_bytes: int = MOST_BYTES) -> None:
    """Write the weights of a sharded ``model``, under the names that its class has in files, on ranks where
    ``writes``; a collective. Other weights in ``folder`` are replaced."""
    if not isinstance(model, PreTrainedModel):
        write_full_weights(model, folder, most_bytes, writes)
        return
    ignored = model._keys_to_ignore_on_save or ()
    write_full_weights(model, folder, most_bytes, writes, partial(_named_as_in_files, model), ignored)


def _named_as_in_files(model: PreTrainedModel, name: str, value: torch.Tensor) -> Mapping[str, torch.Tensor]:
    found: Mapping[str, torch.Tensor] = revert_weight_conversion(model, {name: value})
    return found
