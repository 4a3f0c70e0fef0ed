"""Attributes of ZeRO-3 parameters that DeepSpeed's users and Hugging Face read: ``ds_id`` and its
companions.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from enum import Enum
from functools import partial

from torch import nn

from zero_ext.zero.api.engine_lookup import engine_of

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
