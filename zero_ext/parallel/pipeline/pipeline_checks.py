"""Checks of a pipeline before anything is sent."""

from __future__ import annotations

from typing import Any

import torch

from zero_ext.config import ZeroConfig
from zero_ext.parallel.pipeline.stages.stage_module import StageModule


def check_settings(
    config: ZeroConfig, module: StageModule, micro_batches: int, grad_reduction: str, checkpoint: bool | None
) -> None:
    """Raise ``ValueError`` for settings of a pipeline of ``module`` that are wrong, or that do not fit it or
    ``config``."""
    chunks, by_layers = module.chunks, module.kind.made is None
    accumulated = config.batch.gradient_accumulation_steps
    if grad_reduction not in ("per_step", "per_micro_batch"):
        raise ValueError(
            f"grad_reduction: expected 'per_step' or 'per_micro_batch', got {grad_reduction!r}. Use one of "
            "them."
        )
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 1:
        raise ValueError(
            f"micro_batches: expected an integer of at least 1, got {micro_batches!r}. Pass the number of "
            "micro-batches per step."
        )
    if accumulated not in (1, micro_batches):
        raise ValueError(
            f"micro_batches: expected batch.gradient_accumulation_steps ({accumulated}), which counts the "
            f"micro-batches of a pipeline, got {micro_batches}. Set the key to the same number or leave it "
            "out."
        )
    if grad_reduction == "per_micro_batch" and by_layers:
        raise ValueError(
            f"grad_reduction: expected 'per_step' in schedule {module.schedule!r}, where a layer's gradients "
            "of all micro-batches are computed one after another and reduced once, got 'per_micro_batch'. "
            "Leave it out."
        )
    if checkpoint is not None and not by_layers:
        raise ValueError(
            f"checkpoint: expected None in schedule {module.schedule!r}, where it has no effect, got "
            f"{checkpoint!r}. Leave it out, and use zero_ext.checkpoint_activations inside the layers."
        )
    if grad_reduction == "per_micro_batch" and chunks > 1:
        raise ValueError(
            f"grad_reduction: expected 'per_step' with {chunks} stages per rank, as a pass computes the "
            "gradients of one of them and all would be reduced, got 'per_micro_batch'. Use 'per_step'."
        )
    if grad_reduction == "per_micro_batch" and accumulated != micro_batches:
        raise ValueError(
            f"batch.gradient_accumulation_steps: expected the number of micro-batches ({micro_batches}) with "
            f"grad_reduction 'per_micro_batch', got {accumulated}. Set it to {micro_batches}, or use "
            "'per_step'."
        )
    if config.offload.update_mode == "in_backward" and not by_layers:
        raise ValueError(
            "offload.update_mode: expected 'after_backward' or 'delayed' in a pipeline, where no backward "
            "pass before the last has the full batch's gradients, got 'in_backward'. Use one of the others, "
            "or schedule 'layer_major' with 'pp' 1."
        )


def batch_problem(inputs: tuple[Any, ...] | None, targets: tuple[Any, ...] | None, micro_batches: int) -> str:
    """Why a batch cannot be split here, empty if it can; ``inputs`` and ``targets`` are None where they are
    not read."""
    for name, values in (("inputs", inputs), ("targets", targets)):
        if values is None:
            continue
        if not values or values == (None,):
            return (
                f"batch: expected {name} on a rank with a stage that reads them, got none. Pass them there."
            )
        for each in values:
            if not isinstance(each, torch.Tensor):
                return f"{name}: expected a tensor [batch, ...], got {type(each).__name__}. Pass a tensor."
            if each.dim() == 0 or each.shape[0] == 0 or each.shape[0] % micro_batches:
                return (
                    f"{name}: expected a batch that divides into {micro_batches} micro-batches, got shape "
                    f"{tuple(each.shape)}. Make it a multiple of that, or choose another number of "
                    "micro-batches."
                )
    return ""
