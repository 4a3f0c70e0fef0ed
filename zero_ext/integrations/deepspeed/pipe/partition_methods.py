"""DeepSpeed's ways to cut layers into stages, as a weight for each layer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from zero_ext.parallel.pipeline.layers import Layer, LayerSpec, outline_of

_METHODS = "'parameters', 'uniform' or 'type:' and a regular expression for names of classes"


def weights_by(method: str, layers: Sequence[Layer]) -> list[float]:
    """Return what each layer weighs under ``method``, which is read without regard to case.

    "parameters": elements that are trained. "uniform": 1. "type:REGEX": 1 for layers with a class, or
    function, has a name in which the expression is found, 0 for the others. ``ValueError`` for another method
    and where nothing is found.
    """
    kind, _, pattern = method.partition(":")
    if kind.lower() == "uniform":
        return [1.0] * len(layers)
    if kind.lower() == "parameters":
        return [float(_trained(outline_of(layer))) for layer in layers]
    if kind.lower() != "type" or not pattern:
        raise ValueError(
            f"partition_method: expected {_METHODS}, got {method!r}. To cut by measured seconds, use "
            "zero_ext.parallel.pipeline.PipelineModule(..., split=profile_layers(layers, micro_batch))."
        )
    names = [_name(layer) for layer in layers]
    found = [float(re.search(pattern, name, re.IGNORECASE) is not None) for name in names]
    if not any(found):
        raise ValueError(
            f"partition_method: {method!r} matches none of the layers {sorted(set(names))}. Name one of "
            "those."
        )
    return found


def _trained(layer: nn.Module | None) -> int:
    parameters = layer.parameters() if layer is not None else ()
    return sum(each.numel() for each in parameters if each.requires_grad)


def _name(layer: Any) -> str:
    if isinstance(layer, LayerSpec):
        return layer.kind.__name__
    return type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", "")
