"""Requirements of the 1-bit optimizers on the rest of a configuration."""

from __future__ import annotations

import warnings

from zero_ext.config.schema.base_section import KeyProblem
from zero_ext.config.sections.offload import OffloadConfig
from zero_ext.config.sections.training import PrecisionConfig, SchedulerConfig

ONE_BIT = ("OneBitAdam", "OneBitLamb", "ZeroOneAdam")
_LENGTHS = ("total_num_steps", "total_steps")


def check_one_bit(name: str, stage: int, offload: OffloadConfig, precision: PrecisionConfig) -> None:
    """Raise ``KeyProblem`` if the optimizer called ``name`` cannot run with these settings; nothing is
    asked of other optimizers."""
    if name not in ONE_BIT:
        return
    if stage > 1:
        sharded = "gradients are" if stage == 2 else "gradients and parameters are"
        raise KeyProblem(
            "stage",
            f"expected 0 or 1 with {name}, got {stage}. It compresses full gradients of replicated "
            f"parameters, and in stage {stage} {sharded} sharded. Set stage to 0 or 1, or use AdamW with "
            f"stage {stage}.",
        )
    if stage == 1 and name == "OneBitLamb":
        raise KeyProblem(
            "stage",
            "expected 0 with OneBitLamb, got 1. It reads norms and extremes of full parameters in every "
            "step, which shards do not have. Set stage to 0, or use OneBitAdam.",
        )
    for key, value, wanted in (
        ("offload.optimizer", offload.optimizer, "device"),
        ("offload.update_mode", offload.update_mode, "after_backward"),
        ("precision.moments_dtype", precision.moments_dtype, "fp32"),
    ):
        if value != wanted:
            raise KeyProblem(
                key,
                f"expected {wanted!r} with {name}, got {value!r}. It compresses float32 state on the "
                f"device once all gradients are ready. Set it to {wanted!r}, or use AdamW.",
            )


def warn_of_late_freeze(name: str, freeze_step: float, scheduler: SchedulerConfig | None) -> None:
    """Warn if ``scheduler`` ends before the first step that ``name`` would compress, the one
    after ``freeze_step``."""
    params = scheduler.params if scheduler is not None else {}
    planned = next((params[key] for key in _LENGTHS if isinstance(params.get(key), int | float)), None)
    if planned is not None and freeze_step >= planned:
        warnings.warn(
            f"{name}: the variance is frozen after step {freeze_step:g}, but the scheduler ends at step "
            f"{planned:g}: nothing would ever be compressed. Lower freeze_step; a sixth of the run is usual",
            RuntimeWarning,
            stacklevel=3,
        )
