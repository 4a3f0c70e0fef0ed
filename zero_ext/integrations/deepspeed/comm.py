"""``deepspeed.comm``: torch.distributed under DeepSpeed's names and with its arguments."""

from __future__ import annotations

import datetime
import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
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

from zero_ext.comm.process_group import join_world
from zero_ext.integrations.deepspeed.refused import names_of

__all__ = ["P2POp", "ProcessGroup", "ReduceOp", "get_global_rank", "get_rank", "get_world_size", "new_group"]
__all__ += ["is_available", "is_initialized"]

# Arguments of DeepSpeed's that steer its log of collectives.
_LOGGING = ("prof", "log_name", "debug")
_TIMEOUT = datetime.timedelta(minutes=30)


def _of_torch(function: Callable[..., Any]) -> Callable[..., Any]:
    """Torch's ``function``, taking and dropping the arguments of DeepSpeed's log."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in _LOGGING:
            kwargs.pop(name, None)
        return function(*args, **kwargs)

    return call


all_reduce = _of_torch(dist.all_reduce)
inference_all_reduce = all_reduce
all_gather = _of_torch(dist.all_gather)
all_gather_object = _of_torch(dist.all_gather_object)
all_gather_into_tensor = _of_torch(dist.all_gather_into_tensor)
allgather_fn = all_gather_into_tensor
all_to_all = _of_torch(dist.all_to_all)
all_to_all_single = _of_torch(dist.all_to_all_single)
barrier = _of_torch(dist.barrier)
monitored_barrier = _of_torch(dist.monitored_barrier)
batch_isend_irecv = _of_torch(dist.batch_isend_irecv)
broadcast = _of_torch(dist.broadcast)
broadcast_object_list = _of_torch(dist.broadcast_object_list)
gather = _of_torch(dist.gather)
scatter = _of_torch(dist.scatter)
reduce = _of_torch(dist.reduce)
reduce_scatter = _of_torch(dist.reduce_scatter)
reduce_scatter_tensor = _of_torch(dist.reduce_scatter_tensor)
reduce_scatter_fn = reduce_scatter_tensor
send = _of_torch(dist.send)
recv = _of_torch(dist.recv)
isend = _of_torch(dist.isend)
irecv = _of_torch(dist.irecv)


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
    """Starts torch.distributed unless it runs: with gloo, and NCCL beside it where there is CUDA, as the
    engine wants it. ``dist_backend`` names another.

    ``auto_mpi_discovery``, ``distributed_port``, ``verbose`` and ``config`` change nothing: ranks are those
    that torchrun's environment names. Without such a launcher it is a world of one rank.
    """
    unknown = set(others) - {"auto_mpi_discovery", "distributed_port", "verbose", "config"}
    if unknown:
        raise TypeError(f"init_distributed has no argument {sorted(unknown)[0]!r}")
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
    """Ends torch.distributed, or one group."""
    dist.destroy_process_group(group)


def get_world_group() -> ProcessGroup | None:
    """The group of all ranks."""
    return dist.group.WORLD


def get_local_rank() -> int:
    """This process's rank on its host, as the launcher says."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_all_ranks_from_group(group: ProcessGroup | None = None) -> list[int]:
    """The global ranks of a group, in its order."""
    return list(dist.get_process_group_ranks(group or dist.group.WORLD))


def initialize_mesh_device(mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> Any:
    """Torch's device mesh of this shape."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return dist.init_device_mesh(kind, mesh_shape, mesh_dim_names=mesh_dim_names)


def has_all_gather_into_tensor() -> bool:
    """True."""
    return True


has_reduce_scatter_tensor = has_all_gather_into_tensor

__getattr__ = names_of("deepspeed.comm")
