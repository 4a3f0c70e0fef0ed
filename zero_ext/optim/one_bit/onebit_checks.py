"""Checks that a 1-bit optimizer fits a configuration, before anything is sharded."""

from __future__ import annotations

import math
import warnings

import torch

from zero_ext.config import SchedulerConfig, ZeroConfig
from zero_ext.config.zero_config import check_one_bit
from zero_ext.optim.one_bit.onebit_adam import OneBitAdam
from zero_ext.optim.one_bit.onebit_lamb import OneBitLamb
from zero_ext.optim.one_bit.onebit_optimizer import OneBitOptimizer
from zero_ext.optim.one_bit.zero_one_adam import ZeroOneAdam

# Of the mean that it grows towards: below this a frozen variance makes steps more than 1.15 times as long.
_GROWN = 0.75
_STEP_COUNTS = ("total_num_steps", "total_steps")


def check_one_bit_optimizer(
    optimizer: torch.optim.Optimizer | None, config: ZeroConfig, model_parallel: bool = False
) -> None:
    """Check that `config` supports `optimizer`, if that is of the one-bit family. No rank is contacted.

    Warn if it would never compress, or if its variance is frozen before it has converged.

    Args:
        optimizer: any optimizer, or None.
        config: the configuration that the model is to be prepared with.
        model_parallel: whether the model is split over several ranks ("pp", "tp" or "ep").

    Raises:
        ValueError: `config` does not support it, or `model_parallel` is true.
    """
    if not isinstance(optimizer, OneBitOptimizer):
        return
    name = type(optimizer).__name__
    if model_parallel:
        raise ValueError(
            f"{name}: expected a mesh with 'dp' only, got a model that is split over several ranks (the "
            "mesh has a 'pp', 'tp' or 'ep' axis). With 1-bit compression, ranks that all have the same "
            "parameters agree on whether gradients overflow. Use torch.optim.AdamW, or a mesh with 'dp' "
            "only."
        )
    check_one_bit(name, config.stage, config.offload, config.precision)
    if config.stage == 1 and isinstance(optimizer, ZeroOneAdam) and optimizer.local_step_clipper > 1:
        raise ValueError(
            f"ZeroOneAdam: expected local_step_clipper 1 in stage 1, got {optimizer.local_step_clipper}. "
            "Moments are sharded over the ranks there, and no rank can step alone. Set local_step_clipper "
            "to 1 (the ranks communicate in every step), or stage to 0."
        )
    if isinstance(optimizer, OneBitAdam | OneBitLamb):
        _warn_of_late_freeze(name, optimizer.freeze_step, config.scheduler)
    if isinstance(optimizer, OneBitAdam):
        _warn_of_early_freeze(optimizer)


def _warn_of_early_freeze(optimizer: OneBitAdam) -> None:
    beta2 = max(group["betas"][1] for group in optimizer.param_groups)
    steps = optimizer.freeze_step
    grown = 1 - beta2**steps
    if grown < _GROWN:
        warnings.warn(
            f"OneBitAdam: the variance is frozen after step {steps:g}, when with a second beta of {beta2:g} "
            f"it has grown to {grown:.0%} of what it averages. Its bias is not corrected, so all later steps "
            f"are {1 / math.sqrt(grown):.2g} times as long as Adam's. Set freeze_step to at least "
            f"{math.ceil(math.log(1 - _GROWN) / math.log(beta2))}, or the second beta to at most "
            f"{math.floor(1000 * (1 - _GROWN) ** (1 / steps)) / 1000:g}",
            RuntimeWarning,
            stacklevel=3,
        )


def _warn_of_late_freeze(name: str, freeze_step: float, scheduler: SchedulerConfig | None) -> None:
    """Warn if ``scheduler`` ends before the first step that ``name`` would compress, the one
    after ``freeze_step``."""
    params = scheduler.params if scheduler is not None else {}
    planned = next((params[key] for key in _STEP_COUNTS if isinstance(params.get(key), int | float)), None)
    if planned is not None and freeze_step >= planned:
        warnings.warn(
            f"{name}: the variance is frozen after step {freeze_step:g}, but the scheduler ends at step "
            f"{planned:g}: nothing would ever be compressed. Lower freeze_step; a sixth of the run is usual",
            RuntimeWarning,
            stacklevel=3,
        )
