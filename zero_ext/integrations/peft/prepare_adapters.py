"""``prepare`` for a model with adapters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn

from zero_ext.config import ZeroConfig
from zero_ext.integrations.peft.adapters import mark_adapters
from zero_ext.integrations.prepare_with_features import prepare as prepare_plain


def prepare(
    model: PeftModel,
    optimizer: torch.optim.Optimizer | None = None,
    config: ZeroConfig | Mapping[str, Any] | str | Path | None = None,
    **settings: Any,
) -> tuple[PeftModel, Any]:
    """Prepare a model that `peft.get_peft_model` made, as `zero_ext.prepare`; a collective of all ranks.

    The base model, quantized or not, is sharded and stored in its tier without gradients and optimizer state,
    and adapters train. `model.save_pretrained` then gathers and writes the adapter alone, and what would
    break the link between parameters and their shards says what to do instead.

    Args:
        model: the model with adapters.
        optimizer: as for [`prepare`][zero_ext.prepare].
        config: as for `prepare`.
        **settings: as for `prepare`, but for `wrap`.

    Returns:
        The same `model` and the prepared optimizer.

    Raises:
        TypeError: the model has no adapters. Else as `prepare`.
    """
    if not isinstance(model, PeftModel):
        raise TypeError(
            f"model: expected a peft.PeftModel, got {type(model).__name__}. Call peft.get_peft_model(model, "
            "config) first, or zero_ext.prepare for a model without adapters."
        )
    keep_packing(model)
    _, prepared = prepare_plain(model, optimizer, config, wrap=False, **settings)
    mark_adapters(model)
    return model, prepared


def keep_packing(model: nn.Module) -> None:
    """Has bitsandbytes' 4-bit layers keep the order of their bytes.

    On processors with AVX512-BF16 they put weights into another one in their first evaluation, which would
    replace sharded parameters; layers where it happened are put back.
    """
    module: Any  # bitsandbytes' layers say what they are by attributes
    for module in model.modules():
        if not hasattr(module, "support_avx512bf16_for_cpu"):
            continue
        module.support_avx512bf16_for_cpu = False
        if getattr(getattr(module.weight, "quant_state", None), "packing_format_for_cpu", False):
            module.state_dict()  # bitsandbytes puts the bytes back before it hands them out
            module.quant_state = module.weight.quant_state
