"""``deepspeed.runtime.lr_schedules``: the five schedules, as torch schedulers that count like DeepSpeed's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero_ext.integrations.deepspeed.refused import names_of
from zero_ext.optim import schedulers
from zero_ext.optim.schedule_base import Schedule, count

__all__ = ["LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR", "get_lr_from_config"]

LR_RANGE_TEST = "LRRangeTest"
ONE_CYCLE = "OneCycle"
WARMUP_LR = "WarmupLR"
WARMUP_DECAY_LR = "WarmupDecayLR"
WARMUP_COSINE_LR = "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]

_RATE_OF = {
    LR_RANGE_TEST: "lr_range_test_min_lr",
    ONE_CYCLE: "cycle_max_lr",
    WARMUP_LR: "warmup_max_lr",
    WARMUP_DECAY_LR: "warmup_max_lr",
}


class _Counted(Schedule):
    def step(self, last_batch_iteration: int | None = None) -> None:
        """Move to the next iteration, or to ``last_batch_iteration``."""
        if last_batch_iteration is not None:
            # Torch counts one ahead of DeepSpeed, and its own `epoch` is deprecated.
            self.last_epoch = count("last_batch_iteration", last_batch_iteration, low=0)
        super().step()


class _CountedBatches(_Counted):
    def step(self, batch_iteration: int | None = None) -> None:  # DeepSpeed's other name of the argument
        """Move to the next iteration, or to ``batch_iteration``."""
        super().step(batch_iteration)


class WarmupLR(_Counted, schedulers.WarmupLR):
    """:class:`zero_ext.optim.schedulers.WarmupLR` with DeepSpeed's ``step(last_batch_iteration)``."""


class WarmupDecayLR(WarmupLR, schedulers.WarmupDecayLR):
    """:class:`zero_ext.optim.schedulers.WarmupDecayLR` with DeepSpeed's ``step(last_batch_iteration)``."""


class WarmupCosineLR(_Counted, schedulers.WarmupCosineLR):
    """:class:`zero_ext.optim.schedulers.WarmupCosineLR` with DeepSpeed's ``step(last_batch_iteration)``."""


class OneCycle(_CountedBatches, schedulers.OneCycle):
    """:class:`zero_ext.optim.schedulers.OneCycle` with DeepSpeed's ``step(batch_iteration)``."""


class LRRangeTest(_CountedBatches, schedulers.LRRangeTest):
    """:class:`zero_ext.optim.schedulers.LRRangeTest` with DeepSpeed's ``step(batch_iteration)``."""


def get_lr_from_config(config: Mapping[str, Any]) -> tuple[float | None, str]:
    """The rate that a ``scheduler`` section leads to, and ""; (None, why not) if it names none."""
    kind, params = config.get("type"), config.get("params")
    if kind not in _RATE_OF or not isinstance(params, Mapping):
        return None, f"a section with params and a type among {sorted(_RATE_OF)} wanted, got type {kind!r}"
    rate = params.get(_RATE_OF[str(kind)])
    return (None, f"{_RATE_OF[str(kind)]} is missing") if rate is None else (float(rate), "")


__getattr__ = names_of("deepspeed.runtime.lr_schedules")
