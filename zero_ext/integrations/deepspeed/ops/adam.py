"""``deepspeed.ops.adam``: Adam and AdamW by DeepSpeed's names and arguments.

Making one gives torch's own optimizer, which works by itself, and which ``initialize`` and
``zero_ext.prepare`` run fused over the shards.
"""

from __future__ import annotations

from typing import Any

import torch

from zero_ext.integrations.deepspeed.refused import DeepSpeedFeatureError, names_of


class DeepSpeedCPUAdam:
    """``DeepSpeedCPUAdam(params, ...)`` makes ``torch.optim.AdamW``, or ``Adam`` with ``adamw_mode``
    False."""

    def __new__(  # type: ignore[misc]  # the class is a name for another one
        cls,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> torch.optim.Optimizer:
        """See the class. ``bias_correction`` and ``fp32_optimizer_states`` must be left True."""
        if not fp32_optimizer_states:
            raise DeepSpeedFeatureError(
                "DeepSpeedCPUAdam(fp32_optimizer_states=False): write bf16.bf16_optimizer_states in the JSON"
            )
        _need_bias_correction("DeepSpeedCPUAdam", bias_correction)
        return _adam(adamw_mode, model_params, lr, betas, eps, weight_decay, amsgrad)


class FusedAdam:
    """``FusedAdam(params, ...)`` makes ``torch.optim.AdamW``, or ``Adam`` with ``adam_w_mode`` False."""

    def __new__(  # type: ignore[misc]  # the class is a name for another one
        cls,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> torch.optim.Optimizer:
        """See the class. ``bias_correction`` must be left True; ``set_grad_none`` changes nothing."""
        _need_bias_correction("FusedAdam", bias_correction)
        if amsgrad:
            raise DeepSpeedFeatureError("FusedAdam(amsgrad=True) exists neither here nor in DeepSpeed")
        return _adam(adam_w_mode, params, lr, betas, eps, weight_decay, amsgrad)


def _need_bias_correction(name: str, given: bool) -> None:
    if not given:
        raise DeepSpeedFeatureError(f"{name}(bias_correction=False): the moments are always corrected here")


def _adam(
    decoupled: bool,
    params: Any,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    amsgrad: bool,
) -> torch.optim.Optimizer:
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    return kind(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)


__getattr__ = names_of("deepspeed.ops.adam")
