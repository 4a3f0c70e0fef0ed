"""``deepspeed.runtime.utils``: cuts of lists into parts, moves between devices, memory in use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from zero_ext.integrations.deepspeed.unsupported import names_of
from zero_ext.integrations.deepspeed.utils.logging import log_dist
from zero_ext.monitor.process_memory import resident_bytes
from zero_ext.parallel.pipeline.stages.stage_partition import split_stages
from zero_ext.monitor.sources.process_memory import resident_bytes
from zero_ext.parallel.pipeline.stage_module import split_stages


def see_memory_usage(message: str, force: bool = False, ranks: Sequence[int] = (0,)) -> None:
    """Log the resident memory of the process, if ``force``."""
    if force:
        log_dist(f"{message}: {resident_bytes() / 2**30:.2f} GiB resident", ranks)


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Return the bounds of parts with sizes that differ by at most 1, larger ones first: ``num_parts`` + 1 of
    them."""
    size, larger = divmod(num_items, num_parts)
    return [index * size + min(index, larger) for index in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Return the bounds of parts. The heaviest is as light as can be: ``num_parts`` + 1 of them."""
    if len(weights) <= num_parts:
        return partition_uniform(len(weights), num_parts)
    return [0, *(index.stop for index in split_stages(weights, num_parts))]


def move_to_device(
    item: Any, device: torch.device | str | int, criterion_func: Callable[[Any], bool] | None = None
) -> Any:
    """Return lists, tuples and dictionaries with their tensors on ``device``. Tensors for which
    ``criterion_func`` is true are moved in place."""

    def move(value: Any) -> Any:
        if criterion_func is None or not criterion_func(value):
            return value.to(device)
        value.data = value.to(device)
        return value

    return pytree.tree_map(move, item)


__getattr__ = names_of("deepspeed.runtime.utils")
