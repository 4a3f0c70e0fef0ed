"""``safe_get_*`` and ``safe_set_*``: one parameter's fp32 weights, gradient and optimizer state.

The "full" ones are collectives, at every stage and tier. The "local" ones speak of what this rank owns, as a
flat tensor; replicated state is owned by all.
"""

from __future__ import annotations

import torch
from torch import nn

from zero_ext.integrations.deepspeed.unsupported import names_of
from zero_ext.offload import copy_of, count, replace
from zero_ext.zero.api.full_parameters import (
    MASTER,
    full_gradient,
    full_state,
    owned_slices,
    replace_gradient,
    replace_master,
    replace_state,
)


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return the master weights, whole, on every rank's CPU; None for a frozen parameter."""
    return full_state(param)


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the master weights; the parameter becomes their rounding."""
    replace_master(param, value)


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return the averaged gradient, whole, between backward and step; None without one. Of fp16 parameters it
    is still multiplied by the loss scale.
    """
    return full_gradient(param)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the averaged gradient between backward and step."""
    replace_gradient(param, value)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Optimizer state like "exp_avg", whole, in fp32; None where there is none (yet)."""
    return full_state(param, optim_state_key)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Replace optimizer state like "exp_avg"."""
    replace_state(param, optim_state_key, value)


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's part of the master weights [numel], a copy; None if it owns none."""
    return _local(param, MASTER)


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace this rank's part of the master weights; the parameter follows with the next step."""
    _set_local(param, MASTER, value)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return this rank's part of optimizer state like "exp_avg" [numel], a copy; None if it owns none."""
    return _local(param, optim_state_key)


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Replace this rank's part of optimizer state like "exp_avg"."""
    _set_local(param, optim_state_key, value)


def _local(param: nn.Parameter, kind: str) -> torch.Tensor | None:
    slices = [copy_of(values) for _, values in owned_slices(param, kind)]
    return torch.cat(slices) if slices else None


def _set_local(param: nn.Parameter, kind: str, value: torch.Tensor) -> None:
    slices = [values for _, values in owned_slices(param, kind)]
    wanted = sum(count(values) for values in slices)
    if value.numel() != wanted:
        raise ValueError(
            f"{kind}: expected {wanted} elements, which this rank owns, got {value.numel()}. Pass this "
            "rank's slice."
        )
    for values, own in zip(slices, value.reshape(-1).split([count(v) for v in slices]), strict=True):
        replace(values, own.float())


__getattr__ = names_of("deepspeed.utils.tensor_fragment")
