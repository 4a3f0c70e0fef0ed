"""The common part of 1-bit optimizers as torch optimizers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from zero_ext.optim.one_bit.compression_phase import CompressionPhase


class OneBitOptimizer(torch.optim.Optimizer, ABC):
    """Base class of the optimizers that exchange signs between ranks.

    Its hyper-parameters are those of Adam without bias correction, with decoupled weight decay (Loshchilov &
    Hutter, arXiv 1711.05101). It steps where [`prepare`][zero_ext.prepare] has put it, as it needs the other
    ranks.

    Args:
        params: parameters or param groups.
        lr: learning rate; may be a tensor.
        betas: decay of the first and second moment, each in [0, 1).
        eps: added to the root of the variance.
        weight_decay: decoupled weight decay.
        variance_floor: signs give all elements of a block one step, over the root of the variance of each.
            Where gradients are rare, as of seldom words, that goes too far by orders of magnitude, and
            training diverges. So when signs follow upon a step in full precision, that root is raised to at
            least this times the root mean square of the block's momentum. 0 leaves it as it is in the papers.
        **policy: when what is exchanged, in whole steps of at least 1, the same for all parameters. Each
            becomes an attribute of its name.

    Attributes:
        variance_floor: as given.

    Raises:
        ValueError: a hyper-parameter is out of range; the message names it.
    """

    variance_floor: float

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        variance_floor: float,
        **policy: float,
    ) -> None:
        for name, steps in policy.items():
            if isinstance(steps, bool) or not (steps >= 1 and (math.isinf(steps) or steps == int(steps))):
                raise ValueError(
                    f"{name}: expected an integer number of steps of at least 1, got {steps!r}. Pass such "
                    "a number."
                )
        self._policy: dict[str, Any] = {}
        self._set_settings(variance_floor=variance_floor, **policy)
        numbers = {"lr": lr, "eps": eps, "weight_decay": weight_decay, "variance_floor": variance_floor}
        for name, value in numbers.items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"{name}: expected a finite number of at least 0, got {float(value)}. Pass such a number."
                )
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas: expected two numbers in [0, 1), got {betas}. Pass two such numbers.")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _set_settings(self, **settings: Any) -> None:
        """Attributes that copies have as well."""
        vars(self).update(settings)
        self._policy.update(settings)

    def __getstate__(self) -> dict[str, Any]:
        # torch's own leaves out what a class adds, and with it copies would.
        return {**super().__getstate__(), **self._policy, "_policy": self._policy}

    @abstractmethod
    def phase(self, step: int, sharded: bool) -> CompressionPhase:
        """Return what the ranks exchange in step number `step`.

        Args:
            step: number of the step, from 1.
            sharded: whether moments are sharded across ranks.

        Returns:
            The phase.
        """

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Raise: the exchange needs the ranks. Step the optimizer that `prepare` returns.

        Args:
            closure: never called.

        Returns:
            Nothing.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"{type(self).__name__}.step(): it was called before zero_ext.prepare, and needs the other "
            "ranks. Call step() of the optimizer that model, optimizer = zero_ext.prepare(model, "
            "optimizer, {'stage': 0}) returns."
        )
