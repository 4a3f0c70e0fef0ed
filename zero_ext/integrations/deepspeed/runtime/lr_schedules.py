"""``deepspeed.runtime.lr_schedules``: the five schedules, as torch schedulers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero_ext.integrations.deepspeed.refused import names_of
from zero_ext.optim.schedulers import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

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


def get_lr_from_config(config: Mapping[str, Any]) -> tuple[float | None, str]:
    """The rate that a ``scheduler`` section leads to, and ""; (None, why not) if it names none."""
    kind, params = config.get("type"), config.get("params")
    if kind not in _RATE_OF or not isinstance(params, Mapping):
        return None, f"a section with params and a type among {sorted(_RATE_OF)} wanted, got type {kind!r}"
    rate = params.get(_RATE_OF[str(kind)])
    return (None, f"{_RATE_OF[str(kind)]} is missing") if rate is None else (float(rate), "")


__getattr__ = names_of("deepspeed.runtime.lr_schedules")
