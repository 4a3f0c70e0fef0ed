"""``zero.TiledLinear`` under DeepSpeed's name and with its arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zero_ext.integrations.deepspeed.unsupported import DeepSpeedFeatureError, names_of
from zero_ext.zero.tiling import TiledLinear as NativeTiledLinear


class TiledLinear(NativeTiledLinear):
    """:class:`zero_ext.TiledLinear` with the plain layer's state dict and DeepSpeed's ``init_linear``.

    ``input_is_already_split``, ``combine_out_splits=False`` and another ``linear_cls`` than ``nn.Linear``
    raise :class:`DeepSpeedFeatureError`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        *,
        init_linear: nn.Linear | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **others: Any,
    ) -> None:
        super().__init__(in_features, out_features, bias, in_splits, out_splits, device=device, dtype=dtype)
        expected = {"input_is_already_split": False, "combine_out_splits": True, "linear_cls": nn.Linear}
        for name, value in others.items():
            if name not in expected:
                raise TypeError(
                    f"TiledLinear: expected its own arguments or {', '.join(expected)}, got {name!r}. "
                    "Leave it out."
                )
            if value != expected[name]:
                raise DeepSpeedFeatureError(
                    f"TiledLinear({name}={value!r}): it is not supported: tiles are plain linear layers "
                    "over the "
                    "full input. Use TiledLinear.chunks(inputs) to take the output one tile at a time."
                )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """Take over the values of a plain layer of the same shape."""
        self.load_state_dict(other.state_dict())


__getattr__ = names_of("deepspeed.runtime.zero.tiling")
