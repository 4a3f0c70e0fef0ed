"""``deepspeed.utils.groups``: with data parallelism alone, every question has a plain answer."""

from __future__ import annotations

import torch.distributed as dist

from zero_ext.integrations.deepspeed.unsupported import names_of


def _get_data_parallel_group() -> dist.ProcessGroup | None:
    """Return all ranks."""
    return dist.group.WORLD


def _get_data_parallel_world_size() -> int:
    """Their number."""
    return dist.get_world_size() if dist.is_initialized() else 1


def _get_data_parallel_rank() -> int:
    """Return this process's rank among them."""
    return dist.get_rank() if dist.is_initialized() else 0


def _get_model_parallel_world_size() -> int:
    """1: DeepSpeed's own model and sequence parallelism are not served."""
    return 1


def _get_sequence_parallel_rank() -> int:
    """0."""
    return 0


_get_sequence_parallel_world_size = _get_model_parallel_world_size
get_data_parallel_group = _get_data_parallel_group
get_data_parallel_world_size = _get_data_parallel_world_size
get_data_parallel_rank = _get_data_parallel_rank
get_model_parallel_world_size = get_tensor_model_parallel_world_size = _get_model_parallel_world_size

__getattr__ = names_of("deepspeed.utils.groups")
