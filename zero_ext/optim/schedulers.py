"""DeepSpeed's five learning-rate schedules as torch schedulers.

Each is a `torch.optim.lr_scheduler.LRScheduler`: `step()` after every optimizer step, `get_last_lr()`,
`state_dict()`. They write to the live `param_groups` of any `torch.optim.Optimizer`, groups added later
included. Counting follows DeepSpeed: a new schedule stands at iteration -1 (its start values), the first
`step()` moves it to iteration 0.
"""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zero_ext.config.base_section import is_number
from zero_ext.config.config_errors import show

__all__ = ["LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]

SECOND_BETA = 0.99  # of Adam, while OneCycle moves the first

Rate = float | Sequence[float]


def number(name: str, value: object, *, low: float = -math.inf) -> float:
    """`value` as a float. Raises ValueError naming it unless it is a finite number of at least `low`."""
    if not is_number(value) or value < low:
        limit = "" if low == -math.inf else f" of at least {low:g}"
        raise ValueError(f"{name}: expected a finite number{limit}, got {show(value)}. Pass such a number.")
    return float(value)


def count(name: str, value: object, *, low: int) -> int:
    """`value` as an int (2000.0 counts). Raises ValueError naming it unless it is whole and at least
    `low`."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(
            f"{name}: expected an integer of at least {low}, got {show(value)}. Pass such a number."
        )
    return value


def flag(name: str, value: object) -> bool:
    """`value` if it is a bool. Raises TypeError naming it otherwise."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected true or false, got {show(value)}. Pass one of them.")
    return value


def rate_of(name: str, value: Rate, optimizer: Optimizer, *, low: float = 0.0) -> Rate:
    """Check one rate for all param groups, or a list with one rate for each."""
    if isinstance(value, list | tuple):
        if len(value) != len(optimizer.param_groups):
            raise ValueError(
                f"{name}: expected one number or one for each of the optimizer's "
                f"{len(optimizer.param_groups)} param groups, got {len(value)} values. Pass one for each "
                "param group."
            )
        return [number(f"{name}[{index}]", item, low=low) for index, item in enumerate(value)]
    return number(name, value, low=low)


class Schedule(LRScheduler):
    """A schedule with rates that depend on the iteration alone. Subclasses define `_learning_rate`."""

    def __init__(self, optimizer: Optimizer, last_batch_iteration: int) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}. Pass the "
                "optimizer with the learning rate to schedule."
            )
        iteration = count("last_batch_iteration", last_batch_iteration, low=-1)
        if iteration != -1:
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
        super().__init__(optimizer, iteration)

    @property
    def last_batch_iteration(self) -> int:
        """Index of the last iteration, -1 before the first `step()`."""
        return self.last_epoch - 1

    def get_lr(self) -> list[float | torch.Tensor]:
        """Learning rate of each param group at `last_batch_iteration`."""
        return [self._learning_rate(index) for index in range(len(self.optimizer.param_groups))]

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state. Learning rates themselves live in the optimizer's param_groups."""
        return {
            "type": type(self).__name__,
            "last_batch_iteration": self.last_batch_iteration,
            "last_lr": [float(rate) for rate in self._last_lr],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state of `state_dict()`, or from DeepSpeed's, which holds last_batch_iteration
        alone.

        As with torch's schedulers the optimizer's own state brings the learning rates back; the next
        `step()` sets them in any case. Raises ValueError or TypeError for another schedule's state or bad
        values, and changes nothing then.
        """
        kind = state_dict.get("type", type(self).__name__)
        if kind != type(self).__name__:
            raise ValueError(
                f"state_dict: expected the state of a {type(self).__name__} schedule, got one of {kind}. "
                "Load it into a schedule of the same type."
            )
        if "last_batch_iteration" not in state_dict:
            raise ValueError(
                f"state_dict: expected last_batch_iteration among the keys, got {sorted(state_dict)}. Pass "
                "what state_dict() of a schedule returned."
            )
        iteration = count("last_batch_iteration", state_dict["last_batch_iteration"], low=-1)
        rates = state_dict.get("last_lr", [])
        if not isinstance(rates, list | tuple):
            raise TypeError(
                f"last_lr: expected a list of numbers, got {show(rates)}. Pass what state_dict() of a "
                "schedule returned."
            )
        checked = [number(f"last_lr[{index}]", rate) for index, rate in enumerate(rates)]
        if checked:
            self._last_lr = [*checked]
        self.last_epoch = iteration + 1
        self._step_count = iteration + 2

    @abstractmethod
    def _learning_rate(self, index: int) -> float:
        """Learning rate of param group `index` at `last_batch_iteration`."""

    def _initial_lr(self, index: int) -> float:
        group = self.optimizer.param_groups[index]
        return float(group.setdefault("initial_lr", group["lr"]))

    def _of_group(self, name: str, rate: Rate, index: int) -> float:
        if isinstance(rate, float | int):
            return float(rate)
        if index >= len(rate):
            raise ValueError(
                f"{name}: expected a value for each param group, got {len(rate)} values, and the optimizer "
                "now has more groups. Build the schedule after the last add_param_group."
            )
        return float(rate[index])


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


class OneCycle(Schedule):
    """One cycle of the learning rate from low to high and back, then decay.

    Adam's first beta moves against it.

    While momentum cycles, the second beta of every param group is 0.99, as in DeepSpeed. An optimizer
    without betas gets a warning and keeps its momentum.

    Args:
        optimizer: its param_groups are driven.
        cycle_min_lr: lowest rate; one number, or a list with one for each param group.
        cycle_max_lr: highest rate, likewise.
        decay_lr_rate: after the cycle the rate is cycle_min_lr / (1 + decay_lr_rate x intervals).
        cycle_first_step_size: steps of the rising half.
        cycle_second_step_size: steps of the falling half; None takes those of the rising half.
        cycle_first_stair_count: stairs in the rising half, 0 for a smooth slope.
        cycle_second_stair_count: stairs in the falling half; None takes those of the rising half.
        decay_step_size: steps of a decay interval; 0 means no decay.
        cycle_momentum: move the first beta too.
        cycle_min_mom: lowest first beta, in [0, 1); one number or one for each param group.
        cycle_max_mom: highest first beta, likewise.
        decay_mom_rate: after the cycle the first beta is cycle_max_mom x (1 + decay_mom_rate x intervals).
        last_batch_iteration: iteration to continue after; -1 starts afresh.

    Raises:
        ValueError: a value is out of range; nothing has been written to the optimizer then.
    """

    def __init__(  # the arguments are those of the JSON key "scheduler.params"
        self,
        optimizer: Optimizer,
        cycle_min_lr: Rate,
        cycle_max_lr: Rate,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Rate = 0.8,
        cycle_max_mom: Rate = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        self._low = rate_of("cycle_min_lr", cycle_min_lr, optimizer)
        self._high = rate_of("cycle_max_lr", cycle_max_lr, optimizer)
        self._first = float(count("cycle_first_step_size", cycle_first_step_size, low=1))
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        self._second = float(count("cycle_second_step_size", second, low=0))
        self._total = self._first + self._second
        self._first_stairs = count("cycle_first_stair_count", cycle_first_stair_count, low=0)
        stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self._second_stairs = count("cycle_second_stair_count", stairs, low=0)
        self._interval = count("decay_step_size", decay_step_size, low=0)
        self._lr_decay = number("decay_lr_rate", decay_lr_rate, low=0.0)
        self._momentum_decay = number("decay_mom_rate", decay_mom_rate)
        self._low_momentum = _momentum("cycle_min_mom", cycle_min_mom, optimizer)
        self._high_momentum = _momentum("cycle_max_mom", cycle_max_mom, optimizer)
        self._cycles_momentum = flag("cycle_momentum", cycle_momentum)
        if self._cycles_momentum and "betas" not in optimizer.defaults:
            warnings.warn(
                f"{type(optimizer).__name__} has no betas: OneCycle leaves its momentum alone", stacklevel=2
            )
            self._cycles_momentum = False
        super().__init__(optimizer, last_batch_iteration)

    def step(self, epoch: int | None = None) -> None:
        """Move to the next iteration: set every param group's lr and, when momentum cycles, its betas.

        Args:
            epoch: iteration to go to; default the next one.
        """
        super().step(epoch)
        if self._cycles_momentum:
            for index, group in enumerate(self.optimizer.param_groups):
                group["betas"] = (self._beta(index), SECOND_BETA)

    def _learning_rate(self, index: int) -> float:
        low = self._of_group("cycle_min_lr", self._low, index)
        iteration = self.last_batch_iteration
        if iteration < 0:
            return low
        if iteration < self._total:
            return low + (self._of_group("cycle_max_lr", self._high, index) - low) * self._height(iteration)
        return low / (1 + self._lr_decay * self._intervals(iteration))

    def _beta(self, index: int) -> float:
        low = self._of_group("cycle_min_mom", self._low_momentum, index)
        high = self._of_group("cycle_max_mom", self._high_momentum, index)
        iteration = self.last_batch_iteration
        if iteration < 0:
            return low
        if iteration < self._total:
            return high - (high - low) * self._height(iteration)
        return high * (1 + self._momentum_decay * self._intervals(iteration))

    def _intervals(self, iteration: int) -> float:
        return (iteration - self._total + 1) / self._interval if self._interval else 0.0

    def _height(self, iteration: int) -> float:
        """Position on the triangle in [0, 1] after `iteration`, on the stair below it where there are
        stairs."""
        position = (iteration + 1) % self._total
        rising = position <= self._first
        stairs = self._first_stairs if rising else self._second_stairs
        done, size = (position, self._first) if rising else (self._total - position, self._second)
        if stairs:
            return math.floor(done * stairs / size) / stairs
        return done / size


def _momentum(name: str, value: Rate, optimizer: Optimizer) -> Rate:
    checked = rate_of(name, value, optimizer)
    for item in checked if isinstance(checked, list) else [checked]:
        if not isinstance(item, float) or item >= 1:
            raise ValueError(
                f"{name}: expected a number of at least 0 and below 1, got {item!r}. Pass such a number."
            )
    return checked
