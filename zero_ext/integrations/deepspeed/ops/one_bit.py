"""DeepSpeed's optimizers that exchange signs, by its names and arguments."""

from __future__ import annotations

from typing import Any

from zero_ext.integrations.deepspeed.refused import DeepSpeedFeatureError
from zero_ext.optim.one_bit import OneBitAdam, OneBitLamb, OneBitOptimizer, ZeroOneAdam


class OnebitAdam:
    """``OnebitAdam(params, ...)`` makes :class:`zero_ext.OneBitAdam`."""

    def __new__(  # type: ignore[misc]  # the class is a name for another one
        cls, params: Any, deepspeed: Any = None, lr: float = 1e-3, freeze_step: float = 100000, **more: Any
    ) -> OneBitOptimizer:
        """See the class; ``deepspeed`` and ``bias_correction`` change nothing."""
        return OneBitAdam(params, lr=lr, freeze_step=freeze_step, **_known("OnebitAdam", more))


class OnebitLamb:
    """``OnebitLamb(params, ...)`` makes :class:`zero_ext.OneBitLamb`."""

    def __new__(  # type: ignore[misc]  # the class is a name for another one
        cls, params: Any, deepspeed: Any = None, lr: float = 1e-3, freeze_step: float = 100000, **more: Any
    ) -> OneBitOptimizer:
        """See the class; ``deepspeed`` and ``bias_correction`` change nothing."""
        return OneBitLamb(params, lr=lr, freeze_step=freeze_step, **_known("OnebitLamb", more))


class ZeroOneAdamByName:
    """``ZeroOneAdam(params, ...)`` makes :class:`zero_ext.ZeroOneAdam`."""

    def __new__(  # type: ignore[misc]  # the class is a name for another one
        cls, params: Any, deepspeed: Any = None, lr: float = 1e-3, bias_correction: bool = True, **more: Any
    ) -> OneBitOptimizer:
        """See the class; ``deepspeed`` and ``bias_correction`` change nothing."""
        return ZeroOneAdam(params, lr=lr, **_known("ZeroOneAdam", more))


def _known(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """``given`` without what has no effect."""
    for key in ("eps_inside_sqrt", "amsgrad", "max_grad_norm"):
        if given.get(key):
            raise DeepSpeedFeatureError(
                f"{name}({key}={given[key]!r}): there is no such form of it; leave it"
            )
    without = ("bias_correction", "eps_inside_sqrt", "amsgrad", "max_grad_norm")
    return {key: value for key, value in given.items() if key not in without}
