"""Optimizers that exchange signs between the ranks, and the check that they fit a configuration."""

from __future__ import annotations

import enum
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from zero_ext.config import SchedulerConfig, ZeroConfig
from zero_ext.config.zero_config import check_one_bit
from zero_ext.optim.fused_optimizers import check_settings

__all__ = [
    "CompressionPhase",
    "OneBitAdam",
    "OneBitLamb",
    "OneBitOptimizer",
    "ZeroOneAdam",
    "check_one_bit_optimizer",
]

# Of the mean that it grows towards: below this a frozen variance makes steps more than 1.15 times as long.
_GROWN = 0.75
_STEP_COUNTS = ("total_num_steps", "total_steps")


class CompressionPhase(enum.Enum):
    """The exchange between ranks in one step of a one-bit optimizer.

    Attributes:
        FULL: gradients in full precision; both moments are updated.
        GRADIENT: the signs of gradients; the variance stays.
        MOMENTUM: the signs of the momentum. Each rank has its own. The variance stays.
        SCALED: as `MOMENTUM`, of parameters with momenta scaled to one magnitude.
        LOCAL: nothing; each rank steps by its own momentum, and the variance stays.
        DRIFT: as `LOCAL`, and then the signs of what all steps since the last exchange did.
    """

    FULL = "full"
    GRADIENT = "gradient"
    MOMENTUM = "momentum"
    SCALED = "scaled"
    LOCAL = "local"
    DRIFT = "drift"

    @property
    def compresses(self) -> bool:
        """Return whether gradients stay on their rank, unreduced."""
        return self is not CompressionPhase.FULL


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
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        numbers = ("lr", "eps", "weight_decay", "variance_floor")
        check_settings({**defaults, "variance_floor": variance_floor}, numbers)
        super().__init__(params, defaults)

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
        for names, low, high in (
            ("min_coeff max_coeff", min_coeff, max_coeff),
            ("factor_min factor_max", factor_min, factor_max),
        ):
            if not (0 <= low <= high and math.isfinite(high)):
                smaller, larger = names.split()
                raise ValueError(
                    f"{smaller}: expected 0 to {larger} ({high}), got {low}. Change one of the two."
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


def check_one_bit_optimizer(
    optimizer: torch.optim.Optimizer | None, config: ZeroConfig, model_parallel: bool = False
) -> None:
    """Check that `config` supports `optimizer`, if that is of the one-bit family. No rank is contacted.

    Warn if it would never compress, or if its variance is frozen before it has converged.

    Args:
        optimizer: any optimizer, or None.
        config: the configuration that the model is to be prepared with.
        model_parallel: whether the model is split over several ranks ("pp", "tp" or "ep").

    Raises:
        ValueError: `config` does not support it, or `model_parallel` is true.
    """
    if not isinstance(optimizer, OneBitOptimizer):
        return
    name = type(optimizer).__name__
    if model_parallel:
        raise ValueError(
            f"{name}: expected a mesh with 'dp' only, got a model that is split over several ranks (the "
            "mesh has a 'pp', 'tp' or 'ep' axis). With 1-bit compression, ranks that all have the same "
            "parameters agree on whether gradients overflow. Use torch.optim.AdamW, or a mesh with 'dp' "
            "only."
        )
    check_one_bit(name, config.stage, config.offload, config.precision)
    if config.stage == 1 and isinstance(optimizer, ZeroOneAdam) and optimizer.local_step_clipper > 1:
        raise ValueError(
            f"ZeroOneAdam: expected local_step_clipper 1 in stage 1, got {optimizer.local_step_clipper}. "
            "Moments are sharded over the ranks there, and no rank can step alone. Set local_step_clipper "
            "to 1 (the ranks communicate in every step), or stage to 0."
        )
    if isinstance(optimizer, OneBitAdam | OneBitLamb):
        _warn_of_late_freeze(name, optimizer.freeze_step, config.scheduler)
    if isinstance(optimizer, OneBitAdam):
        _warn_of_early_freeze(optimizer)


def _warn_of_early_freeze(optimizer: OneBitAdam) -> None:
    beta2 = max(group["betas"][1] for group in optimizer.param_groups)
    steps = optimizer.freeze_step
    grown = 1 - beta2**steps
    if grown < _GROWN:
        warnings.warn(
            f"OneBitAdam: the variance is frozen after step {steps:g}, when with a second beta of {beta2:g} "
            f"it has grown to {grown:.0%} of what it averages. Its bias is not corrected, so all later steps "
            f"are {1 / math.sqrt(grown):.2g} times as long as Adam's. Set freeze_step to at least "
            f"{math.ceil(math.log(1 - _GROWN) / math.log(beta2))}, or the second beta to at most "
            f"{math.floor(1000 * (1 - _GROWN) ** (1 / steps)) / 1000:g}",
            RuntimeWarning,
            stacklevel=3,
        )


def _warn_of_late_freeze(name: str, freeze_step: float, scheduler: SchedulerConfig | None) -> None:
    """Warn if ``scheduler`` ends before the first step that ``name`` would compress."""
    params = scheduler.params if scheduler is not None else {}
    planned = next((params[key] for key in _STEP_COUNTS if isinstance(params.get(key), int | float)), None)
    if planned is not None and freeze_step >= planned:
        warnings.warn(
            f"{name}: the variance is frozen after step {freeze_step:g}, but the scheduler ends at step "
            f"{planned:g}: nothing would ever be compressed. Lower freeze_step; a sixth of the run is usual",
            RuntimeWarning,
            stacklevel=3,
        )
