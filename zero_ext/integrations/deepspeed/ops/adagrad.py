"""``deepspeed.ops.adagrad``: Adagrad by DeepSpeed's name."""

from __future__ import annotations

from typing import Any

import torch

from zero_ext.integrations.deepspeed.refused import DeepSpeedFeatureError, names_of


class DeepSpeedCPUAdagrad:
    """``DeepSpeedCPUAdagrad(params, ...)`` makes ``torch.optim.Adagrad``."""

    def __new__(  # type: ignore[misc]  # the class is a name for another one
        cls,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> torch.optim.Adagrad:
        """See the class; ``amsgrad`` and ``fp32_optimizer_states`` must be left alone."""
        if amsgrad or not fp32_optimizer_states:
            raise DeepSpeedFeatureError(
                "DeepSpeedCPUAdagrad: amsgrad=True and fp32_optimizer_states=False are not served; "
                "leave them out"
            )
        return torch.optim.Adagrad(model_params, lr=lr, eps=eps, weight_decay=weight_decay)


__getattr__ = names_of("deepspeed.ops.adagrad")
