"""Replacement of meta tensors by real ones, initialized as in construction, or zero for now."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable

import torch
from torch import nn

from zero_ext.zero.units.dtensor_local import like_parameter, local_tensor

Make = Callable[[torch.Tensor], torch.Tensor]


def materialize(modules: Iterable[nn.Module]) -> None:
    """Replace the meta tensors of ``modules``, in order of construction, and initialize them.

    Children come before their parents: a constructor makes its submodules, and their constructors initialize
    them, and calls its own ``reset_parameters`` at its end. Tied parameters stay tied. Raises ``ValueError``
    for meta tensors that no ``reset_parameters`` of their module initializes.
    """
    made: dict[torch.Tensor, torch.Tensor] = {}
    done: dict[nn.Module, bool] = {}
    for module in modules:
        _visit(module, made, done)


def _visit(module: nn.Module, made: dict[torch.Tensor, torch.Tensor], done: dict[nn.Module, bool]) -> bool:
    """Return whether ``module``, or one inside it, had meta tensors."""
    if module in done:
        return done[module]
    done[module] = False
    inside = [_visit(child, made, done) for child in module.children()]
    fresh = _replace(module, made, lambda old: torch.empty_like(old, device="cpu"))
    if fresh or any(inside):
        done[module] = True
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if callable(reset):
            reset()
        elif fresh:
            raise ValueError(
                f"module {type(module).__name__}, built on the meta device with {fresh}: expected a "
                "reset_parameters to initialize them, got none. Build it inside zero_ext.Init "
                "without torch.device('meta'), or pass init='skip' to zero_ext.prepare and load a "
                "checkpoint."
            )
    return done[module]


def leave_meta(model: nn.Module) -> None:
    """Replace meta parameters by zeros without memory, and meta buffers by zeros, to be loaded later.

    Buffers outside the state dict stay on the meta device, with a warning: no checkpoint would fill them.
    """
    made: dict[torch.Tensor, torch.Tensor] = {}
    left: list[str] = []
    for prefix, module in model.named_modules():
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers.get(name)
            if buffer is not None and buffer.is_meta:
                made[buffer] = buffer
                left.append(f"{prefix}.{name}" if prefix else name)
    for module in model.modules():
        _replace(module, made, _zeros)
    if left:
        warnings.warn(
            f"buffers {sorted(left)} stay on the meta device: they are not part of the state dict, so no "
            "checkpoint fills them. Give them values before the first forward.",
            RuntimeWarning,
            stacklevel=3,
        )


def _zeros(old: torch.Tensor) -> torch.Tensor:
    if isinstance(old, nn.Parameter):
        zeros = torch.zeros((), dtype=old.dtype, device="cpu").expand(local_tensor(old).shape)
        return like_parameter(old, zeros)
    return torch.zeros_like(old, device="cpu")


def _replace(module: nn.Module, made: dict[torch.Tensor, torch.Tensor], make: Make) -> list[str]:
    """Give ``module`` real tensors for its meta ones; the names of those that nobody had replaced yet."""
    fresh = []
    for name, parameter in list(module._parameters.items()):
        if parameter is not None and parameter.is_meta:
            if parameter not in made:
                fresh.append(name)
                made[parameter] = _moved(parameter, make(parameter))
            setattr(module, name, made[parameter])
    for name, buffer in list(module._buffers.items()):
        if buffer is not None and buffer.is_meta:
            if buffer not in made:
                fresh.append(name)
                made[buffer] = make(buffer)
            module._buffers[name] = made[buffer]
    return fresh


def _moved(parameter: nn.Parameter, value: torch.Tensor) -> nn.Parameter:
    """``parameter`` itself with another tensor inside, or a new one where something holds the old one weakly
    (recurrent modules do)."""
    new = nn.Parameter(value, requires_grad=parameter.requires_grad)
    vars(new).update(vars(parameter))  # what it is marked with
    try:
        torch.utils.swap_tensors(parameter, new)
    except RuntimeError:
        return new
    return parameter
