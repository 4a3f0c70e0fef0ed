"""``deepspeed.comm``: torch.distributed under DeepSpeed's names and with its arguments.

``deepspeed.utils.groups``: the data-parallel ranks are those of the newest pipeline, or all without one.
"""

from __future__ import annotations

import datetime
import functools
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import (
    P2POp,
    ProcessGroup,
    ReduceOp,
    get_global_rank,
    get_rank,
    get_world_size,
    is_available,
    is_initialized,
    new_group,
)
from torch.distributed.device_mesh import DeviceMesh

from zero_ext.comm.process_group import join_world
from zero_ext.integrations.deepspeed.deepspeed_config import check_others
from zero_ext.zero.units.rank_groups import data_group

__all__ = ["P2POp", "ProcessGroup", "ReduceOp", "get_global_rank", "get_rank", "get_world_size", "new_group"]
__all__ += ["is_available", "is_initialized"]

# Arguments of DeepSpeed's that steer its log of collectives.
_LOGGING = ("prof", "log_name", "debug")
_WITHOUT_EFFECT = ("auto_mpi_discovery", "distributed_port", "verbose", "config")
# The file of variables for ranks on other hosts, which only DeepSpeed's launcher reads.
DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
_TIMEOUT = datetime.timedelta(minutes=30)


def _of_torch(function: Callable[..., Any]) -> Callable[..., Any]:
    """Torch's ``function``, taking and dropping the arguments of DeepSpeed's log."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in _LOGGING:
            kwargs.pop(name, None)
        return function(*args, **kwargs)

    return call


_COLLECTIVES = (
    "all_reduce all_gather all_gather_object all_gather_into_tensor all_to_all all_to_all_single barrier "
    "monitored_barrier batch_isend_irecv broadcast broadcast_object_list gather scatter reduce "
    "reduce_scatter reduce_scatter_tensor send recv isend irecv"
)
_OLDER = {
    "inference_all_reduce": "all_reduce",
    "allgather_fn": "all_gather_into_tensor",
    "reduce_scatter_fn": "reduce_scatter_tensor",
}
globals().update({name: _of_torch(getattr(dist, name)) for name in _COLLECTIVES.split()})
globals().update({name: globals()[newer] for name, newer in _OLDER.items()})


def init_distributed(
    dist_backend: str | None = None,
    *,
    timeout: datetime.timedelta = _TIMEOUT,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    rank: int = -1,
    world_size: int = -1,
    **others: Any,
) -> None:
    """Start torch.distributed unless it runs: with gloo, and NCCL where there is CUDA, as the
    engine wants it. ``dist_backend`` names another.

    ``auto_mpi_discovery``, ``distributed_port``, ``verbose`` and ``config`` change nothing: ranks are those
    that torchrun's environment names. Without such a launcher it is a world of one rank.
    """
    check_others("init_distributed", others, {}, _WITHOUT_EFFECT)
    if dist.is_initialized() or dist_init_required is False:
        return
    if dist_backend in (None, "gloo", "nccl", "cpu:gloo,cuda:nccl") and init_method is None and rank < 0:
        join_world(timeout.total_seconds())
    if dist.is_initialized():
        return
    if rank < 0 and "WORLD_SIZE" not in os.environ:
        # A world of one: a store in memory needs no address.
        store = dist.HashStore()
        dist.init_process_group(dist_backend or "gloo", store=store, rank=0, world_size=1, timeout=timeout)
        return
    dist.init_process_group(
        dist_backend or "gloo", init_method=init_method, timeout=timeout, rank=rank, world_size=world_size
    )


def destroy_process_group(group: ProcessGroup | None = None) -> None:
    """End torch.distributed, or one group."""
    dist.destroy_process_group(group)


def get_world_group() -> ProcessGroup | None:
    """Return the group of all ranks."""
    return dist.group.WORLD


def get_local_rank() -> int:
    """Return this process's rank on its host, as the launcher says."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_all_ranks_from_group(group: ProcessGroup | None = None) -> list[int]:
    """Return the global ranks of a group, in its order."""
    return list(dist.get_process_group_ranks(group or dist.group.WORLD))


def initialize_mesh_device(mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> Any:
    """Torch's device mesh of this shape."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return dist.init_device_mesh(kind, mesh_shape, mesh_dim_names=mesh_dim_names)


def has_all_gather_into_tensor() -> bool:
    """Return True."""
    return True


def has_coalescing_manager() -> bool:
    """Return False: use torch's functions tensor by tensor."""
    return False


def get_world_rank_from_launcher() -> int:
    """Return this process's rank, as the launcher says."""
    return int(os.environ.get("RANK", "0"))


def get_world_size_from_launcher() -> int:
    """Return the number of ranks, as the launcher says."""
    return int(os.environ.get("WORLD_SIZE", "1"))


has_reduce_scatter_tensor = has_all_gather_into_tensor
has_all_reduce_coalesced = has_coalescing_manager
get_local_rank_from_launcher = get_local_rank


# The meshes of the pipelines that live, the newest last.
_PIPELINE_MESHES: weakref.WeakKeyDictionary[nn.Module, DeviceMesh] = weakref.WeakKeyDictionary()


def add_pipeline(module: nn.Module, mesh: DeviceMesh) -> None:
    """Have ``deepspeed.utils.groups`` answer for the ranks of a pipeline as long as it lives."""
    _PIPELINE_MESHES[module] = mesh


def _get_data_parallel_group() -> dist.ProcessGroup | None:
    """Return the ranks with other samples than this one."""
    meshes = list(_PIPELINE_MESHES.values())
    return data_group(meshes[-1]) if meshes else dist.group.WORLD


def _get_data_parallel_world_size() -> int:
    """Their number."""
    return dist.get_world_size(_get_data_parallel_group()) if dist.is_initialized() else 1


def _get_data_parallel_rank() -> int:
    """Return this process's rank among them."""
    return dist.get_rank(_get_data_parallel_group()) if dist.is_initialized() else 0


def _get_data_parallel_group_ranks() -> list[int]:
    """Return their global ranks."""
    return get_all_ranks_from_group(_get_data_parallel_group())


def _get_broadcast_src_rank() -> int:
    """Return the global rank of the first of them."""
    return _get_data_parallel_group_ranks()[0]


def _get_model_parallel_world_size() -> int:
    """1: DeepSpeed's own model and sequence parallelism are not served."""
    return 1


def _get_sequence_parallel_rank() -> int:
    """0."""
    return 0


_get_sequence_parallel_world_size = _get_model_parallel_world_size
get_data_parallel_group = _get_sequence_data_parallel_group = _get_data_parallel_group
get_data_parallel_world_size = _get_sequence_data_parallel_world_size = _get_data_parallel_world_size
get_data_parallel_rank = _get_sequence_data_parallel_rank = _get_data_parallel_rank
get_model_parallel_world_size = get_tensor_model_parallel_world_size = _get_model_parallel_world_size
get_model_parallel_rank = get_tensor_model_parallel_rank = _get_sequence_parallel_rank
