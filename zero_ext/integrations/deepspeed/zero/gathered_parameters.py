"""``GatheredParameters`` and its companions under DeepSpeed's names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zero_ext.integrations.deepspeed.param_attributes import ZeroParamStatus, set_status
from zero_ext.zero.api.engine_lookup import PARAMETER_ATTRIBUTE, engine_of
from zero_ext.zero.api.gathered import gathered
from zero_ext.zero.units.presharded import presharded_of


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
