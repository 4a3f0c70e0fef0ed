"""What DeepSpeed's users and Hugging Face read from parameters of ZeRO-3: ``ds_id`` and its companions."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from torch import nn

from zero_ext.zero.lookup import engine_of


class ZeroParamStatus(Enum):
    """Whether the whole parameter is there."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ZeroParamType(Enum):
    """How a parameter is kept."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


def mark_sharded(model: nn.Module) -> None:
    """Gives the parameters of a model prepared in stage 3 DeepSpeed's attributes; elsewhere they have
    none."""
    if engine_of(model).config.stage == 3:
        mark(model.parameters())


def mark(parameters: Iterable[nn.Parameter]) -> None:
    """Gives ``parameters`` what DeepSpeed does: ``ds_id``, ``ds_shape``, ``ds_numel`` and ``ds_status``.

    The status tells who asks outside forward, which is all that it is asked for: ``GatheredParameters`` makes
    it AVAILABLE inside its block.
    """
    for parameter in parameters:
        parameter.ds_id = id(parameter)  # type: ignore[attr-defined]
        parameter.ds_shape = parameter.shape  # type: ignore[attr-defined]
        parameter.ds_numel = parameter.numel()  # type: ignore[attr-defined]
        parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE  # type: ignore[attr-defined]


def set_status(parameters: Iterable[nn.Parameter], status: ZeroParamStatus) -> None:
    """Sets the status of those that have one."""
    for parameter in parameters:
        if hasattr(parameter, "ds_id"):
            parameter.ds_status = status  # type: ignore[attr-defined]
