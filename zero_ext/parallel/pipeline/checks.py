"""What a pipeline refuses before anything is sent."""

from __future__ import annotations

from typing import Any

import torch

from zero_ext.config import ZeroConfig


def check_settings(config: ZeroConfig, chunks: int, micro_batches: int, reduce: str) -> None:
    """Raises ``ValueError`` for settings of a pipeline with ``chunks`` stages a rank that are wrong, or that
    do not fit ``config``."""
    accumulated = config.batch.gradient_accumulation_steps
    if reduce not in ("once", "each"):
        raise ValueError(f"reduce: {reduce!r} given, 'once' or 'each' wanted")
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 1:
        raise ValueError(f"micro_batches: {micro_batches!r} given, a whole number of at least 1 wanted")
    if accumulated not in (1, micro_batches):
        raise ValueError(
            f"micro_batches is {micro_batches}, but batch.gradient_accumulation_steps {accumulated}: the "
            "micro-batches of a pipeline are what it accumulates; set it to the same number or leave it out"
        )
    if reduce == "each" and chunks > 1:
        raise ValueError(
            f"reduce 'each' with {chunks} stages a rank: a pass has gradients of one of them, but all would "
            "be reduced; use 'once'"
        )
    if reduce == "each" and accumulated != micro_batches:
        raise ValueError(
            "reduce 'each' needs batch.gradient_accumulation_steps to be the number of micro-batches, "
            f"{micro_batches}; it is {accumulated}"
        )
    if config.offload.step == "in_backward":
        raise ValueError(
            "offload.step is 'in_backward', but in a pipeline no backward pass before the last has the whole "
            "batch's gradients; set it to 'after_backward' or 'delayed'"
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
