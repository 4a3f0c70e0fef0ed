"""Hooks on parameters: their gradients leave ``param.grad`` for the unit's flat gradient as they arrive."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import nn


class GradientSink(Protocol):
    """Who takes the gradients."""

    def gradient_comes(self, parameter: nn.Parameter) -> None:
        """Right before autograd accumulates into ``parameter.grad``."""

    def gradient_came(self, parameter: nn.Parameter) -> None:
        """Right after; ``parameter.grad`` is this backward's gradient."""


def watch_all(parameters: Iterable[nn.Parameter], sink: GradientSink) -> None:
    """Registers both hooks, on frozen parameters too, so that unfreezing one later works.

    The hooks hold ``sink`` and the parameters weakly.
    """
    for parameter in parameters:
        _watch(parameter, sink)


def unwatch(parameters: Iterable[nn.Parameter]) -> None:
    """Removes both hooks."""
    for parameter in parameters:
        with torch._C.DisableTorchFunctionSubclass():
            tables = (parameter._backward_hooks or {}, parameter._post_accumulate_grad_hooks or {})
        for table in tables:
            for key, hook in list(table.items()):
                if getattr(hook, "__module__", "") == __name__:
                    del table[key]


def _watch(parameter: nn.Parameter, sink: GradientSink) -> None:
    weak_sink, weak_parameter = weakref.ref(sink), weakref.ref(parameter)

    def before(_: torch.Tensor) -> None:
        alive, target = weak_sink(), weak_parameter()
        if alive is not None and target is not None:
            alive.gradient_comes(target)

    def after(target: torch.Tensor) -> None:
        alive = weak_sink()
        if alive is not None:
            alive.gradient_came(target)  # type: ignore[arg-type]

    trainable = parameter.requires_grad
    if not (parameter.is_floating_point() or parameter.is_complex()):
        return
    parameter.requires_grad_(True)
    parameter.register_hook(before)
    parameter.register_post_accumulate_grad_hook(after)
    parameter.requires_grad_(trainable)
