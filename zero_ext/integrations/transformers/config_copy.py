"""Configuration objects of transformers, which models share, made a model's own."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from transformers import PreTrainedConfig


def own_configurations(model: nn.Module) -> None:
    """Give `model` copies of the configurations its modules hold, so that changes reach no other model.

    Modules that shared an object share its copy, and a configuration within another one stays there.
    """
    copied: dict[int, Any] = {}
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, PreTrainedConfig):
                setattr(module, name, copy.deepcopy(value, copied))
