"""The functions that Hugging Face replaces for a moment around ``zero.Init``: DeepSpeed's wrapper of tensor
constructors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zero_ext.integrations.deepspeed.accelerator import get_accelerator

__all__ = ["_orig_torch_arange", "get_accelerator", "zero_wrapper_for_fp_tensor_constructor"]

_orig_torch_arange = torch.arange


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Any], target_dtype: object
) -> Callable[..., Any]:
    """``fn`` itself: no constructor changes its dtype or device here, so none has to be wrapped."""
    return fn
