"""DeepSpeed's five learning-rate schedules as torch schedulers.

Each is a `torch.optim.lr_scheduler.LRScheduler`: `step()` after every optimizer step, `get_last_lr()`,
`state_dict()`. They write to the live `param_groups` of any `torch.optim.Optimizer`, groups added later
included. Counting follows DeepSpeed: a new schedule stands at iteration -1 (its start values), the first
`step()` moves it to iteration 0.
"""

from __future__ import annotations

import math
import warnings

from torch.optim import Optimizer

from .one_cycle import OneCycle
from .schedule_base import Rate, Schedule, count, flag, number, rate_of

__all__ = ["LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]


class _Warmup:
    """The share in [0, 1] of a warm-up that `iteration` steps have covered, growing as a logarithm or a
    line."""

    def __init__(self, num_steps: int, kind: str) -> None:
        if kind not in ("log", "linear"):
            raise ValueError(f"warmup_type: expected 'log' or 'linear', got {kind!r}. Choose one of them.")
        self.steps = max(2, count("warmup_num_steps", num_steps, low=1))
        self._logarithmic = kind == "log"
        self._inverse_log = 1.0 / math.log(self.steps)

    def share(self, iteration: int) -> float:
        if self._logarithmic:
            return self._inverse_log * math.log(iteration + 1)
        return iteration / self.steps


def _total_steps(total_num_steps: int, warmup: _Warmup) -> int:
    total = count("total_num_steps", total_num_steps, low=1)
    if total < warmup.steps:
        warnings.warn(f"total_num_steps={total} is less than warmup_num_steps={warmup.steps}", stacklevel=3)
    return total


class WarmupLR(Schedule):
    """Rise from warmup_min_lr to warmup_max_lr over warmup_num_steps steps, then stay.

    Args:
        optimizer: its param_groups are driven.
        warmup_min_lr: rate at the start; one number, or a list with one for each param group.
        warmup_max_lr: rate after the warm-up, likewise; None takes each group's own lr.
        warmup_num_steps: steps of the warm-up, at least 1 (1 counts as 2).
        warmup_type: "log" or "linear".
        last_batch_iteration: iteration to continue after; -1 starts afresh.

    Raises:
        ValueError: a value is out of range; nothing has been written to the optimizer then.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: Rate = 0.0,
        warmup_max_lr: Rate | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self._warmup = _Warmup(warmup_num_steps, warmup_type)
        self._low = rate_of("warmup_min_lr", warmup_min_lr, optimizer)
        self._high = None if warmup_max_lr is None else rate_of("warmup_max_lr", warmup_max_lr, optimizer)
        super().__init__(optimizer, last_batch_iteration)

    def _learning_rate(self, index: int) -> float:
        iteration = self.last_batch_iteration
        low = self._of_group("warmup_min_lr", self._low, index)
        if iteration < 0:
            return low
        high = (
            self._initial_lr(index)
            if self._high is None
            else self._of_group("warmup_max_lr", self._high, index)
        )
        warming = iteration < self._warmup.steps
        return low + (high - low) * (self._warmup.share(iteration) if warming else self._share_after_warmup())

    def _share_after_warmup(self) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """WarmupLR, then fall in a line to 0 at total_num_steps.

    Args:
        optimizer: its param_groups are driven.
        total_num_steps: steps of the whole training, warm-up included.
        warmup_min_lr: as in WarmupLR. The line falls below warmup_min_lr's part of the range to warmup_min_lr
            itself, which is the rate of a share of 0.
        warmup_max_lr: as in WarmupLR.
        warmup_num_steps: as in WarmupLR.
        warmup_type: as in WarmupLR.
        last_batch_iteration: as in WarmupLR.

    Raises:
        ValueError: a value is out of range; nothing has been written to the optimizer then.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: Rate = 0.0,
        warmup_max_lr: Rate = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self._total = _total_steps(total_num_steps, _Warmup(warmup_num_steps, warmup_type))
        super().__init__(
            optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration
        )

    def _share_after_warmup(self) -> float:
        left = float(self._total - self.last_batch_iteration)
        return max(0.0, left / float(max(1.0, self._total - self._warmup.steps)))


class WarmupCosineLR(Schedule):
    """Multiply each group's own lr by a ratio that warms up and then falls along a cosine.

    The warm-up is from warmup_min_ratio to 1, and half a cosine goes to cos_min_ratio.

    The rate is 0 before the first `step()`.

    Args:
        optimizer: its param_groups are driven.
        total_num_steps: steps of the whole training, warm-up included.
        warmup_min_ratio: ratio at the start of the warm-up.
        warmup_num_steps: steps of the warm-up, at least 1 (1 counts as 2).
        cos_min_ratio: ratio at total_num_steps and after it.
        warmup_type: "log" or "linear".
        last_batch_iteration: iteration to continue after; -1 starts afresh.

    Raises:
        ValueError: a value is out of range; nothing has been written to the optimizer then.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self._warmup = _Warmup(warmup_num_steps, warmup_type)
        self._total = _total_steps(total_num_steps, self._warmup)
        self._start_ratio = number("warmup_min_ratio", warmup_min_ratio, low=0.0)
        self._end_ratio = number("cos_min_ratio", cos_min_ratio, low=0.0)
        super().__init__(optimizer, last_batch_iteration)

    def _learning_rate(self, index: int) -> float:
        # The group's own rate is noted before this schedule first overwrites it.
        own = self._initial_lr(index)
        return own * self._ratio(self.last_batch_iteration) if self.last_batch_iteration >= 0 else 0.0

    def _ratio(self, iteration: int) -> float:
        if iteration < self._warmup.steps:
            return self._start_ratio + self._warmup.share(iteration) * (1.0 - self._start_ratio)
        done = iteration - self._warmup.steps + 1
        progress = min(1.0, done / max(1, self._total - self._warmup.steps))
        return max(0.0, self._end_ratio + (1.0 - self._end_ratio) * ((1 + math.cos(math.pi * progress)) / 2))


class LRRangeTest(Schedule):
    """Raise the rate without end to find where training diverges (Smith, arXiv 1803.09820, section 4.1).

    Args:
        optimizer: its param_groups are driven.
        lr_range_test_min_lr: rate at the start; one number, or a list with one for each param group.
        lr_range_test_step_size: steps after which the rate has grown by lr_range_test_step_rate of its start.
        lr_range_test_step_rate: that growth.
        lr_range_test_staircase: grow once every lr_range_test_step_size steps instead of at each step.
        last_batch_iteration: iteration to continue after; -1 starts afresh.

    Raises:
        ValueError: a value is out of range; nothing has been written to the optimizer then.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: Rate = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self._low = rate_of("lr_range_test_min_lr", lr_range_test_min_lr, optimizer)
        self._size = count("lr_range_test_step_size", lr_range_test_step_size, low=1)
        self._growth = number("lr_range_test_step_rate", lr_range_test_step_rate)
        self._staircase = flag("lr_range_test_staircase", lr_range_test_staircase)
        super().__init__(optimizer, last_batch_iteration)

    def _learning_rate(self, index: int) -> float:
        intervals = float(self.last_batch_iteration + 1) / self._size
        if self._staircase:
            intervals = math.floor(intervals)
        return self._of_group("lr_range_test_min_lr", self._low, index) * (1 + self._growth * intervals)
