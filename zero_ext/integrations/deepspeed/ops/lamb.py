"""``deepspeed.ops.lamb``: LAMB by DeepSpeed's names."""

from __future__ import annotations

from typing import Any

from zero_ext.integrations.deepspeed.refused import DeepSpeedFeatureError, names_of
from zero_ext.optim.lamb import Lamb


class FusedLamb:
    """``FusedLamb(params, ...)`` makes :class:`zero_ext.Lamb`."""

    def __new__(  # type: ignore[misc]  # the class is a name for another one
        cls,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> Lamb:
        """See the class; ``max_grad_norm`` must be left 0 and ``amsgrad`` False."""
        if max_grad_norm:
            raise DeepSpeedFeatureError(
                f"FusedLamb(max_grad_norm={max_grad_norm}): write gradient_clipping in the JSON"
            )
        if amsgrad:
            raise DeepSpeedFeatureError(
                "FusedLamb(amsgrad=True): neither DeepSpeed nor zero_ext has that variant"
            )
        return Lamb(
            params, lr, bias_correction, betas, eps, eps_inside_sqrt, weight_decay, max_coeff, min_coeff
        )


__getattr__ = names_of("deepspeed.ops.lamb")
