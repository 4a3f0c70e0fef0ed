"""1-bit Adam as a torch optimizer."""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT

from zero_ext.optim.one_bit.compression_phase import CompressionPhase
from zero_ext.optim.one_bit.onebit_optimizer import OneBitOptimizer


class OneBitAdam(OneBitOptimizer):
    """1-bit Adam: after `freeze_step` steps the variance is frozen and ranks exchange one bit per element.

    What the compression loses is added to what is sent next. The first `freeze_step` steps are Adam's without
    bias correction, with gradients in full precision. Supports ZeRO stages 0 and 1. The optimizer steps only
    after [`prepare`][zero_ext.prepare], because the exchange needs the ranks. Names and defaults are
    DeepSpeed's.

    Source: Tang et al., "1-bit Adam" (arXiv 2102.02888), algorithm 1.

    Args:
        params: parameters or param groups.
        lr: learning rate; may be a tensor.
        freeze_step: steps with full precision at the start; may be `math.inf`.
        betas: decay of the first and second moment, each in [0, 1).
        eps: added to the root of the variance.
        weight_decay: decoupled weight decay.
        cuda_aware: no effect; the ranks' own connections are used.
        comm_backend_name: no effect.
        variance_floor: lower bound of the root of the variance, relative to the momentum; see
            [`OneBitOptimizer`][zero_ext.optim.one_bit.OneBitOptimizer].

    Attributes:
        freeze_step: as given.

    Raises:
        ValueError: a hyper-parameter is out of range; the message names it.
    """

    freeze_step: float

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        freeze_step: float = 100000,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
        variance_floor: float = 0.5,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, variance_floor, freeze_step=freeze_step)

    def phase(self, step: int, sharded: bool) -> CompressionPhase:
        """Return what the ranks exchange in step number `step`.

        Where moments are sharded no rank has the momentum of its own gradients in full, so there the signs of
        gradients are sent.

        Args:
            step: number of the step, from 1.
            sharded: whether moments are sharded across ranks (stage 1).

        Returns:
            `FULL` up to `freeze_step`, then `GRADIENT` if sharded, else `MOMENTUM`.
        """
        if step <= self.freeze_step:
            return CompressionPhase.FULL
        return CompressionPhase.GRADIENT if sharded else CompressionPhase.MOMENTUM
