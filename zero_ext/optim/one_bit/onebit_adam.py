"""1-bit Adam as a torch optimizer."""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT

from zero_ext.optim.one_bit.compression_phase import CompressionPhase
from zero_ext.optim.one_bit.onebit_optimizer import OneBitOptimizer


class OneBitAdam(OneBitOptimizer):
    """Adam whose variance is frozen after ``freeze_step`` steps; from then on the ranks exchange one bit an
    element, and what that loses is added to what they send next.

    The first ``freeze_step`` steps are Adam's without bias correction, with gradients in full precision;
    ``freeze_step`` may be ``math.inf``. Names and defaults are DeepSpeed's; ``cuda_aware`` and
    ``comm_backend_name`` have no effect: the ranks' own connections are used. ``variance_floor``: see
    :class:`OneBitOptimizer`. ZeRO stages 0 and 1.

    Raises ``ValueError`` naming the hyper-parameter that is out of range.

    Source: Tang et al., "1-bit Adam" (arXiv 2102.02888), algorithm 1.
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
        """See :class:`OneBitOptimizer`. The momentum of a rank's own gradients is never whole where moments
        are shared out, so there it is gradients whose signs are sent."""
        if step <= self.freeze_step:
            return CompressionPhase.FULL
        return CompressionPhase.GRADIENT if sharded else CompressionPhase.MOMENTUM
