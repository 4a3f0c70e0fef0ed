"""1-bit LAMB as a torch optimizer."""

from __future__ import annotations

import math

import torch
from torch.optim.optimizer import ParamsT

from zero_ext.optim.one_bit.compression_phase import CompressionPhase
from zero_ext.optim.one_bit.onebit_optimizer import OneBitOptimizer


class OneBitLamb(OneBitOptimizer):
    """1-bit LAMB: after `freeze_step` steps the variance is frozen and ranks exchange signs of the momentum.

    The first `freeze_step` steps are LAMB's without bias correction. Their trust ratios, clamped to
    [`min_coeff`, `max_coeff`], are averaged with `coeff_beta`. Later that average is multiplied by a
    factor: the largest ratio of the roots of the frozen variance and of one made of gradients that are
    reconstructed from the momentum. It is in [`factor_min`, `factor_max`] and changes by at most
    `factor_threshold` of itself per step. For the exchange, momenta are scaled to one magnitude. Supports
    ZeRO stage 0. The optimizer steps only after [`prepare`][zero_ext.prepare]. Names and defaults are
    DeepSpeed's.

    Source: Li et al., "1-bit LAMB" (arXiv 2104.06069), algorithm 1.

    Args:
        params: parameters or param groups.
        lr: learning rate; may be a tensor.
        freeze_step: steps with full precision at the start; may be `math.inf`.
        betas: decay of the first and second moment, each in [0, 1).
        eps: added to the root of the variance.
        weight_decay: decoupled weight decay.
        max_coeff: upper bound of the trust ratio.
        min_coeff: lower bound of the trust ratio.
        cuda_aware: no effect; the ranks' own connections are used.
        comm_backend_name: no effect.
        variance_floor: lower bound of the root of the variance, relative to the momentum; see
            [`OneBitOptimizer`][zero_ext.optim.one_bit.OneBitOptimizer].
        coeff_beta: decay of the average of trust ratios, in [0, 1).
        factor_max: upper bound of the factor.
        factor_min: lower bound of the factor.
        factor_threshold: largest relative change of the factor per step, in [0, 1).

    Attributes:
        freeze_step: as given.
        coefficients: `min_coeff` and `max_coeff`.
        factors: `factor_min` and `factor_max`.
        coeff_beta: as given.
        factor_threshold: as given.

    Raises:
        ValueError: a hyper-parameter is out of range; the message names it.
    """

    freeze_step: float
    coefficients: tuple[float, float]
    factors: tuple[float, float]
    coeff_beta: float
    factor_threshold: float

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        freeze_step: float = 100000,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        *,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
        variance_floor: float = 0.5,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, variance_floor, freeze_step=freeze_step)
        for name, low, high in (("coeff", min_coeff, max_coeff), ("factor", factor_min, factor_max)):
            if not (0 <= low <= high and math.isfinite(high)):
                names = (f"min_{name}", f"max_{name}") if name == "coeff" else (f"{name}_min", f"{name}_max")
                raise ValueError(
                    f"{names[0]}: expected 0 to {names[1]} ({high}), got {low}. Change one of the two."
                )
        for name, value in (("coeff_beta", coeff_beta), ("factor_threshold", factor_threshold)):
            if not 0 <= value < 1:
                raise ValueError(f"{name}: expected a number in [0, 1), got {value}. Pass such a number.")
        self._set_settings(
            coefficients=(min_coeff, max_coeff),
            factors=(factor_min, factor_max),
            coeff_beta=coeff_beta,
            factor_threshold=factor_threshold,
        )

    def phase(self, step: int, sharded: bool) -> CompressionPhase:
        """Return what the ranks exchange in step number `step`.

        Args:
            step: number of the step, from 1.
            sharded: no effect: only stage 0 is supported.

        Returns:
            `FULL` up to `freeze_step`, then `SCALED`.
        """
        return CompressionPhase.FULL if step <= self.freeze_step else CompressionPhase.SCALED
