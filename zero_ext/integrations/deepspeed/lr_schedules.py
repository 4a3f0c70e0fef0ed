"""``deepspeed.runtime.lr_schedules``: the five schedules, as torch schedulers that count like DeepSpeed's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

from zero_ext.optim import schedulers
from zero_ext.optim.schedulers import SECOND_BETA, Schedule, count

__all__ = ["LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR", "get_lr_from_config"]

VALID_LR_SCHEDULES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]
_RATE_OF = {
    "LRRangeTest": "lr_range_test_min_lr",
    "OneCycle": "cycle_max_lr",
    "WarmupLR": "warmup_max_lr",
    "WarmupDecayLR": "warmup_max_lr",
}


def _as(inner: str) -> Any:
    """Return what DeepSpeed calls something else: the attribute at the path ``inner``."""
    return property(attrgetter(inner))


def _by_group(inner: str, kind: Callable[[float], Any] = float) -> Any:
    """Return the value of ``inner`` for every param group, each as ``kind`` of it; None is a group's own
    rate.
    """

    def read(schedule: Any) -> list[Any]:
        value = getattr(schedule, inner)
        count = range(len(schedule.optimizer.param_groups))
        own = schedule._initial_lr
        return [kind(own(i) if value is None else schedule._of_group(inner, value, i)) for i in count]

    return property(read)


def _betas(beta: float) -> tuple[float, float]:
    return beta, SECOND_BETA


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

    min_lrs, max_lrs = _by_group("_low"), _by_group("_high")
    warmup_num_steps = _as("_warmup.steps")


class WarmupDecayLR(WarmupLR, schedulers.WarmupDecayLR):
    """:class:`zero_ext.optim.schedulers.WarmupDecayLR` with DeepSpeed's ``step(last_batch_iteration)``."""

    total_num_steps = _as("_total")


class WarmupCosineLR(_Counted, schedulers.WarmupCosineLR):
    """:class:`zero_ext.optim.schedulers.WarmupCosineLR` with DeepSpeed's ``step(last_batch_iteration)``."""

    total_num_steps, warmup_num_steps = _as("_total"), _as("_warmup.steps")
    warmup_min_ratio, cos_min_ratio = _as("_start_ratio"), _as("_end_ratio")

    def get_lr_ratio(self) -> float:
        """Return the share of the groups' own rates at the last iteration; 0 before the first."""
        return self._ratio(self.last_batch_iteration) if self.last_batch_iteration >= 0 else 0.0


class OneCycle(_CountedBatches, schedulers.OneCycle):
    """:class:`zero_ext.optim.schedulers.OneCycle` with DeepSpeed's ``step(batch_iteration)``."""

    min_lrs, max_lrs = _by_group("_low"), _by_group("_high")
    min_moms, max_moms = _by_group("_low_momentum", _betas), _by_group("_high_momentum", _betas)
    first_step_size, second_step_size, total_size = _as("_first"), _as("_second"), _as("_total")
    cycle_momentum, decay_step_size = _as("_cycles_momentum"), _as("_interval")
    decay_lr_rate, decay_mom_rate = _as("_lr_decay"), _as("_momentum_decay")

    @property
    def step_ratio(self) -> float:
        """The rising half's share of the cycle."""
        return self._first / self._total

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas of every param group at the last iteration; None if momentum stays."""
        if self._cycles_momentum and self.last_batch_iteration < 0:
            return list(self.max_moms)  # where the first iteration starts from
        groups = range(len(self.optimizer.param_groups))
        return [_betas(self._beta(index)) for index in groups] if self._cycles_momentum else None


class LRRangeTest(_CountedBatches, schedulers.LRRangeTest):
    """:class:`zero_ext.optim.schedulers.LRRangeTest` with DeepSpeed's ``step(batch_iteration)``."""

    min_lr = _by_group("_low")
    step_size, step_rate, staircase = _as("_size"), _as("_growth"), _as("_staircase")


def get_lr_from_config(config: Mapping[str, Any]) -> tuple[float | None, str]:
    """Return the rate that a ``scheduler`` section leads to, and ""; (None, why not) if it names none."""
    kind, params = config.get("type"), config.get("params")
    if kind not in _RATE_OF or not isinstance(params, Mapping):
        return None, f"expected a section with params and a type among {sorted(_RATE_OF)}, got type {kind!r}"
    rate = params.get(_RATE_OF[str(kind)])
    return (None, f"{_RATE_OF[str(kind)]} is missing") if rate is None else (float(rate), "")
