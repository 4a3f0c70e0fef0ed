"""Single parameters under DeepSpeed's names: their attributes ``ds_*``, ``GatheredParameters``,
``safe_get_*`` and ``safe_set_*``."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Iterator
from enum import Enum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zero_ext.offload import copy_of, count, replace
from zero_ext.zero.api.engine_lookup import PARAMETER_ATTRIBUTE, engine_of
from zero_ext.zero.api.full_parameters import (
    MASTER,
    full_gradient,
    full_state,
    gathered,
    owned_slices,
    replace_gradient,
    replace_master,
    replace_state,
)
from zero_ext.zero.units.presharded import presharded_of

_ATTRIBUTES = ("ds_id", "ds_shape", "ds_numel", "ds_status", "partition_numel")


class ZeroParamStatus(Enum):
    """The states of a parameter: present in full or not."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ZeroParamType(Enum):
    """The storage of a parameter."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


def mark_sharded(model: nn.Module) -> None:
    """Give the parameters of a model prepared in stage 3 DeepSpeed's attributes; elsewhere they lose those
    that they had."""
    engine = engine_of(model)
    if engine.config.stage == 3:
        mark(model.parameters(), engine.world_size)
        return
    for parameter in model.parameters():
        for name in _ATTRIBUTES:
            vars(parameter).pop(name, None)


def mark(parameters: Iterable[nn.Parameter], ranks: int) -> None:
    """Set ``ds_id``, ``ds_shape``, ``ds_numel``, ``ds_status`` and ``partition_numel()``, as DeepSpeed does.

    The status holds outside forward, where callers read it, and where ``ds_active_sub_modules``, the modules
    that run with the parameter, is empty. ``GatheredParameters`` makes the status AVAILABLE inside its block.
    ``partition_numel()`` is DeepSpeed's share of one of ``ranks``, padding included.
    """
    for parameter in parameters:
        parameter.ds_id = id(parameter)  # type: ignore[attr-defined]
        parameter.ds_shape = parameter.shape  # type: ignore[attr-defined]
        parameter.ds_numel = parameter.numel()  # type: ignore[attr-defined]
        parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE  # type: ignore[attr-defined]
        parameter.ds_active_sub_modules = set()  # type: ignore[attr-defined]
        # Unlike a lambda it can be pickled with the parameter.
        shares = partial(operator.floordiv, parameter.numel() + ranks - 1, ranks)
        parameter.partition_numel = shares  # type: ignore[attr-defined]


def set_status(parameters: Iterable[nn.Parameter], status: ZeroParamStatus) -> None:
    """Set the status of those that have one."""
    for parameter in parameters:
        if hasattr(parameter, "ds_id"):
            parameter.ds_status = status  # type: ignore[attr-defined]


class GatheredParameters:
    """Makes sharded parameters whole inside the block, on every rank; a collective.

    With ``modifier_rank`` that rank's values become everybody's, those of ordinary parameters among
    ``params`` too. Without it a write to a sharded parameter raises ``RuntimeError`` (DeepSpeed drops it in
    silence). ``fwd_module`` has no meaning: modules find parameters of others by themselves. None among
    ``params`` counts for nothing, as in a list with a bias that is missing. Raises ``TypeError`` for anything
    but a parameter, a module or an iterable of parameters.
    """

    def __init__(
        self,
        params: nn.Module | torch.Tensor | Iterable[torch.Tensor | None],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        listed = _listed(params) if enabled else []
        self._sharded = [item for item in listed if _is_sharded(item)]
        self._plain = [item for item in listed if not _is_sharded(item)]
        self._modifier_rank = modifier_rank
        self._open = contextlib.ExitStack()

    def __enter__(self) -> None:
        if self._sharded:
            self._open.enter_context(gathered(self._sharded, self._modifier_rank))
        set_status(self._sharded + self._plain, ZeroParamStatus.AVAILABLE)

    def __exit__(self, *error: Any) -> None:
        set_status(self._sharded + self._plain, ZeroParamStatus.NOT_AVAILABLE)
        if error[0] is None and self._modifier_rank is not None:
            # Under zero.Init what is still whole will be cut on every rank from its own values.
            _broadcast_from(self._plain, self._modifier_rank)
        self._open.__exit__(*error)


@contextlib.contextmanager
def unwrap_model_for_generation(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the wrapped module with all its parameters gathered inside the block; a collective."""
    engine = engine_of(model)
    with gathered(engine.model):
        yield engine.model


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Nothing to do: a parameter that another module uses is gathered when it is read."""
    if not isinstance(parameter, nn.Parameter):
        raise TypeError(f"parameter: expected an nn.Parameter, got {type(parameter).__name__}. Pass one.")


def _listed(params: nn.Module | torch.Tensor | Iterable[torch.Tensor | None]) -> list[nn.Parameter]:
    if isinstance(params, nn.Module):
        params = params.parameters()
    elif isinstance(params, torch.Tensor):
        params = [params]
    listed = [item for item in params if item is not None]
    for item in listed:
        if not isinstance(item, torch.Tensor):
            raise TypeError(
                f"GatheredParameters: expected parameters, got {type(item).__name__}. Pass only those."
            )
    return [item for item in listed if isinstance(item, nn.Parameter)]


def _is_sharded(parameter: nn.Parameter) -> bool:
    return presharded_of(parameter) is not None or getattr(parameter, PARAMETER_ATTRIBUTE, None) is not None


def _broadcast_from(parameters: Iterable[nn.Parameter], source: int) -> None:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    with torch.no_grad():
        for parameter in parameters:
            if not parameter.is_meta:
                value = parameter.data.contiguous()
                dist.broadcast(value, source)
                if value.data_ptr() != parameter.data_ptr():
                    parameter.data.copy_(value)


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
