"""The OneCycle schedule (Smith, arXiv 1803.09820, sections 3 and 4): rates up and down, momentum against
them."""

from __future__ import annotations

import math
import warnings

from torch.optim import Optimizer

from .schedule_base import Rate, Schedule, count, flag, number, rate_of

SECOND_BETA = 0.99


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
