"""The common part of DeepSpeed's schedules: checked arguments, counting, and a state that JSON can hold."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zero_ext.config.base_section import is_number
from zero_ext.config.config_errors import show

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
