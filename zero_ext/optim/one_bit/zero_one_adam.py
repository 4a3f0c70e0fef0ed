"""0/1 Adam as a torch optimizer."""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT

from zero_ext.optim.one_bit.compression_phase import CompressionPhase
from zero_ext.optim.one_bit.onebit_optimizer import OneBitOptimizer


class ZeroOneAdam(OneBitOptimizer):
    """0/1 Adam: the variance is updated ever more seldom, and ranks exchange one bit per element or nothing.

    Until `var_freeze_step` the variance is updated from gradients in full precision at the multiples of an
    interval, which is 1 and doubles after every `var_update_scaler` updates. In the steps between, the
    ranks exchange the signs of their gradients. Then the variance is frozen and a rank steps by its own
    momentum: only at the multiples of another interval the ranks exchange the signs of what these steps did.
    That interval is 1 and doubles after every `local_step_scaler` steps, up to `local_step_clipper`.

    Supports ZeRO stage 0, and stage 1 with `local_step_clipper` 1: without its momentum no rank can step
    alone. The optimizer steps only after [`prepare`][zero_ext.prepare]. Names and defaults are DeepSpeed's.

    Source: Lu et al., "Maximizing communication efficiency for large-scale training via 0/1 Adam"
    (arXiv 2202.06009), algorithm 1 and section 6 (the policies).

    Args:
        params: parameters or param groups.
        lr: learning rate; may be a tensor.
        betas: decay of the first and second moment, each in [0, 1).
        eps: added to the root of the variance.
        weight_decay: decoupled weight decay.
        var_freeze_step: steps after which the variance is frozen; may be `math.inf`.
        var_update_scaler: updates of the variance after which their interval doubles.
        local_step_scaler: local steps after which the interval between exchanges doubles.
        local_step_clipper: largest interval between exchanges, in steps.
        cuda_aware: no effect; the ranks' own connections are used.
        comm_backend_name: no effect.
        variance_floor: lower bound of the root of the variance, relative to the momentum; see
            [`OneBitOptimizer`][zero_ext.optim.one_bit.OneBitOptimizer].

    Attributes:
        var_freeze_step: as given.
        var_update_scaler: as given.
        local_step_scaler: as given.
        local_step_clipper: as given.

    Raises:
        ValueError: a hyper-parameter is out of range; the message names it.
    """

    var_freeze_step: float
    var_update_scaler: int
    local_step_scaler: int
    local_step_clipper: int

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        var_freeze_step: float = 100000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32678,
        local_step_clipper: int = 16,
        *,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
        variance_floor: float = 0.5,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            variance_floor,
            var_freeze_step=var_freeze_step,
            var_update_scaler=var_update_scaler,
            local_step_scaler=local_step_scaler,
            local_step_clipper=local_step_clipper,
        )

    def phase(self, step: int, sharded: bool) -> CompressionPhase:
        """Return what the ranks exchange in step number `step`.

        Args:
            step: number of the step, from 1.
            sharded: whether moments are sharded across ranks (stage 1).

        Returns:
            Up to `var_freeze_step`, `FULL` where the variance is updated and `GRADIENT` between. Later
            `GRADIENT` if sharded, else `DRIFT` where ranks exchange and `LOCAL` between.
        """
        if step <= self.var_freeze_step:
            return CompressionPhase.GRADIENT if step % self.variance_interval(step) else CompressionPhase.FULL
        if sharded:
            return CompressionPhase.GRADIENT
        return CompressionPhase.LOCAL if step % self.local_interval(step) else CompressionPhase.DRIFT

    def variance_interval(self, step: int) -> int:
        """Return the interval between updates of the variance around step number `step`.

        Args:
            step: number of the step, from 1.

        Returns:
            The interval in steps, a power of two.
        """
        interval, last = 1, 0
        while True:
            last = (last // interval + self.var_update_scaler) * interval
            if step <= last:
                return interval
            interval *= 2

    def local_interval(self, step: int) -> int:
        """Return the interval between exchanges around step number `step`.

        Args:
            step: number of the step, greater than `var_freeze_step`.

        Returns:
            The interval in steps, at most `local_step_clipper`.
        """
        doublings = (step - int(self.var_freeze_step) - 1) // self.local_step_scaler
        # Beyond 62 doublings no run gets anywhere, and the clipper may be infinite.
        return int(min(self.local_step_clipper, 2 ** min(doublings, 62)))
