"""``deepspeed.ops.lion``: Lion by DeepSpeed's names."""

from __future__ import annotations

from typing import Any

from zero_ext.integrations.deepspeed.refused import DeepSpeedFeatureError, names_of
from zero_ext.optim.lion import Lion


class FusedLion:
    """``FusedLion(params, ...)`` makes :class:`zero_ext.Lion`."""

    def __new__(  # type: ignore[misc]  # the class is a name for another one
        cls,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> Lion:
        """See the class; ``set_grad_none`` changes nothing."""
        return Lion(params, lr=lr, betas=betas, weight_decay=weight_decay)


class DeepSpeedCPULion:
    """``DeepSpeedCPULion(params, ...)`` makes :class:`zero_ext.Lion`."""

    def __new__(  # type: ignore[misc]  # the class is a name for another one
        cls,
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> Lion:
        """See the class; ``fp32_optimizer_states`` must be left True."""
        if not fp32_optimizer_states:
            raise DeepSpeedFeatureError(
                "DeepSpeedCPULion(fp32_optimizer_states=False): write bf16.bf16_optimizer_states in the JSON"
            )
        return Lion(model_params, lr=lr, betas=betas, weight_decay=weight_decay)


__getattr__ = names_of("deepspeed.ops.lion")
