"""``save_pretrained`` of a sharded model that writes its weights a tensor at a time."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
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
from zero_ext.zero.units.collective_errors import raise_on_all_ranks

_OTHERS = ".partial-others"


def can_stream(model: nn.Module) -> bool:
    """Return whether the weights of a sharded ``model`` can be written a tensor at a time: each tensor of the
    files is made of one of the model's. Quantized weights and slices of models are not."""
    if isinstance(checkpoint_sources(engine_of(model)).full, ModelParallelState):
        return False
    if not isinstance(model, PreTrainedModel):
        return not hasattr(model, "peft_config")  # of which the adapters are saved
    if getattr(model, "hf_quantizer", None) is not None or getattr(model, "_hf_peft_config_loaded", False):
        return False
    tensors = {
        each.names[0]: torch.empty(each.shape, dtype=each.parameters[0].dtype, device="meta")
        for each in full_sources(engine_of(model))
    }
    at_once = _kinds(revert_weight_conversion(model, dict(tensors)))
    alone: dict[str, tuple[torch.Size, torch.dtype]] = {}
    for name, value in tensors.items():
        alone |= _kinds(revert_weight_conversion(model, {name: value}))
    return alone == at_once


def _kinds(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (value.shape, value.dtype) for name, value in tensors.items()}


def save_streamed(
    model: nn.Module, folder: Path, writes: bool, save_others: Callable[[Path], object]
) -> None:
    """Save a sharded ``model`` on ranks where ``writes``; a collective. It replaces weights in ``folder``.

    ``save_others`` writes what else belongs there to another folder. Its own weights are left out. Where it
    or the weights fail, on all ranks, ``folder`` is as before.
    """
    everyone = checkpoint_sources(engine_of(model)).full.everyone
    others = folder / _OTHERS

    def write_others() -> None:
        if writes:
            shutil.rmtree(others, ignore_errors=True)
            others.mkdir(parents=True)
            save_others(others)

    def publish_others() -> None:
        for path in others.iterdir() if writes else ():
            if path.suffix == ".safetensors":
                continue
            target = folder / path.name
            if path.is_dir() and target.is_dir():
                shutil.rmtree(target)
            path.replace(target)

    try:
        raise_on_all_ranks(everyone, write_others, f"writing to {folder}")
        if isinstance(model, PreTrainedModel):
            names, ignored = partial(_named_as_in_files, model), model._keys_to_ignore_on_save or ()
            write_full_weights(model, folder, MOST_BYTES, writes, names, ignored)
        else:
            write_full_weights(model, folder, MOST_BYTES, writes)
        raise_on_all_ranks(everyone, publish_others, f"writing to {folder}")
    finally:
        if writes:
            shutil.rmtree(others, ignore_errors=True)


def _named_as_in_files(model: PreTrainedModel, name: str, value: torch.Tensor) -> Mapping[str, torch.Tensor]:
    found: Mapping[str, torch.Tensor] = revert_weight_conversion(model, {name: value})
    return found
