"""Outputs of the engine with gradients divided by the accumulation steps, as in DeepSpeed since 0.18."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch

# How many calls of engine.backward, which divides the loss itself, are under way in the process.
_UNDIVIDED = 0


def divided_once(outputs: Any, steps: int) -> Any:
    """Return ``outputs`` with views in place of tensors that have a graph, in tuples, lists and dicts too.

    Gradients of the views are divided by ``steps``. DeepSpeed puts hooks on the tensors themselves, which
    divides twice where a loss that the model returns was computed from logits that it returns as well.
    """
    if isinstance(outputs, torch.Tensor):
        if outputs.grad_fn is None:
            return outputs
        view = outputs.view_as(outputs)
        view.register_hook(lambda gradient: gradient if _UNDIVIDED else gradient / steps)
        return view
    if isinstance(outputs, list | tuple):
        items = [divided_once(item, steps) for item in outputs]
        return type(outputs)(*items) if hasattr(outputs, "_fields") else type(outputs)(items)
    if isinstance(outputs, dict):
        copied = copy.copy(outputs)
        for name, item in outputs.items():
            copied[name] = divided_once(item, steps)
        return copied
    return outputs


@contextlib.contextmanager
def undivided() -> Iterator[None]:
    """Around a backward pass of a loss that has been divided already."""
    global _UNDIVIDED
    _UNDIVIDED += 1
    try:
        yield
    finally:
        _UNDIVIDED -= 1
