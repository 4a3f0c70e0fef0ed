"""Hooks on parameters that move each gradient from ``param.grad`` to the unit's flat gradient."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import nn


class GradientSink(Protocol):
    """Receives the gradients."""

    def before_accumulate_grad(self, parameter: nn.Parameter) -> None:
        """Prepare ``parameter.grad`` before autograd accumulates into it."""

    def after_accumulate_grad(self, parameter: nn.Parameter) -> None:
        """Take this backward's gradient from ``parameter.grad``."""


def watch_all(parameters: Iterable[nn.Parameter], sink: GradientSink) -> None:
    """Register both hooks. Frozen parameters get them, too, so that they can be unfrozen later.

    The hooks hold ``sink`` and the parameters weakly.
    """
    for parameter in parameters:
        _watch(parameter, sink)


def unwatch(parameters: Iterable[nn.Parameter]) -> None:
    """Remove both hooks."""
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
            alive.before_accumulate_grad(target)

    def after(target: torch.Tensor) -> None:
        alive = weak_sink()
        if alive is not None:
            alive.after_accumulate_grad(target)  # type: ignore[arg-type]

    trainable = parameter.requires_grad
    if not (parameter.is_floating_point() or parameter.is_complex()):
        return
    parameter.requires_grad_(True)
    parameter.register_hook(before)
    parameter.register_post_accumulate_grad_hook(after)
    parameter.requires_grad_(trainable)
