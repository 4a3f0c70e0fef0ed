"""What a pipeline refuses before anything is sent."""

from __future__ import annotations

from typing import Any

import torch

from zero_ext.config import ZeroConfig
from zero_ext.parallel.pipeline.stages.stage_module import StageModule


def check_settings(
    config: ZeroConfig, module: StageModule, micro_batches: int, grad_reduction: str, checkpoint: bool | None
) -> None:
    """Raises ``ValueError`` for settings of a pipeline of ``module`` that are wrong, or that do not fit it or
    ``config``."""
    chunks, by_layers = module.chunks, module.kind.made is None
    accumulated = config.batch.gradient_accumulation_steps
    if grad_reduction not in ("per_step", "per_micro_batch"):
        raise ValueError(f"grad_reduction: {grad_reduction!r} given, 'per_step' or 'per_micro_batch' wanted")
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 1:
        raise ValueError(f"micro_batches: {micro_batches!r} given, a whole number of at least 1 wanted")
    if accumulated not in (1, micro_batches):
        raise ValueError(
            f"micro_batches is {micro_batches}, but batch.gradient_accumulation_steps {accumulated}: the "
            "micro-batches of a pipeline are what it accumulates; set it to the same number or leave it out"
        )
    if grad_reduction == "per_micro_batch" and by_layers:
        raise ValueError(
            f"grad_reduction 'per_micro_batch' in schedule {module.schedule!r}, where a layer's gradients of "
            "all micro-batches come one after another and are reduced once; leave it out"
        )
    if checkpoint is not None and not by_layers:
        raise ValueError(
            f"checkpoint: {checkpoint!r} given, which has no effect in schedule {module.schedule!r}; leave "
            "it out, and use zero_ext.checkpoint_activations inside the layers"
        )
    if grad_reduction == "per_micro_batch" and chunks > 1:
        raise ValueError(
            f"grad_reduction 'per_micro_batch' with {chunks} stages per rank: a pass has gradients of one of "
            "them, but all would be reduced; use 'per_step'"
        )
    if grad_reduction == "per_micro_batch" and accumulated != micro_batches:
        raise ValueError(
            "grad_reduction 'per_micro_batch' needs batch.gradient_accumulation_steps to be the number of "
            f"micro-batches, {micro_batches}; it is {accumulated}"
        )
    if config.offload.update_mode == "in_backward" and not by_layers:
        raise ValueError(
            "offload.update_mode is 'in_backward', but in a pipeline no backward pass before the last has "
            "the whole batch's gradients; set it to 'after_backward' or 'delayed', or take "
            "schedule 'layer_major' with 'pp' 1"
        )


def batch_problem(inputs: tuple[Any, ...] | None, targets: tuple[Any, ...] | None, micro_batches: int) -> str:
    """Why a batch cannot be split here, empty if it can; ``inputs`` and ``targets`` are None where they are
    not read."""
    for name, values in (("inputs", inputs), ("targets", targets)):
        if values is None:
            continue
        if not values or values == (None,):
            return f"a batch without {name} on a rank whose stage reads them; pass them there"
        for each in values:
            if not isinstance(each, torch.Tensor):
                return f"{name}: {type(each).__name__} given, a tensor [batch, ...] wanted"
            if each.dim() == 0 or each.shape[0] == 0 or each.shape[0] % micro_batches:
                return (
                    f"{name} of shape {tuple(each.shape)}: the batch does not divide into {micro_batches} "
                    "micro-batches; make it a multiple of that, or choose another number"
                )
    return ""
