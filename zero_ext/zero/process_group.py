"""Process groups of an engine: taken from the caller, from torchrun's environment, or none for one rank."""

from __future__ import annotations

import datetime
import os
import uuid
from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist

from zero_ext.comm import Collectives, GroupExchange, WireLog, fastest_exchange
from zero_ext.comm.exchange import Message, Waitable

BACKENDS = ("gloo", "fake")


def join_world(timeout_seconds: float) -> None:
    """Starts torch.distributed with gloo if a launcher (torchrun) set the environment and nobody did yet."""
    if dist.is_available() and not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout_seconds))


def make_collectives(group: dist.ProcessGroup | None, timeout_seconds: float) -> Collectives:
    """Collectives over ``group`` (default: the world) on connections of their own; a collective call.

    Without torch.distributed, one rank. Raises ``ValueError`` for a backend that cannot send and receive
    CPU tensors.
    """
    wire = WireLog()
    if not (dist.is_available() and dist.is_initialized()):
        return alone()
    parent = group if group is not None else dist.group.WORLD
    if parent is None:
        raise AssertionError("torch.distributed runs without a default group")
    ranks = dist.get_process_group_ranks(parent)
    rank, world_size = dist.get_rank(group), len(ranks)
    if rank < 0:
        raise ValueError(f"rank {dist.get_rank()} is not a member of the process group given, ranks {ranks}")
    if world_size == 1:
        return alone()
    offered = str(dist.get_backend(group))
    backend = next((name for name in BACKENDS if name in offered), None)
    if backend is None:
        raise ValueError(f"process group backend '{offered}': CPU tensors need 'gloo' (or 'cpu:gloo,...')")
    if backend == "fake":
        return Collectives(rank, world_size, GroupExchange(parent), GroupExchange(parent), wire)
    # Not dist.new_group: its local names differ between ranks that belong to different numbers of groups, and
    # it keeps every group for the life of the process.
    store = dist.PrefixStore(_shared_name(parent), parent.get_group_store())
    timeout = datetime.timedelta(seconds=timeout_seconds)
    gathers, reductions = (
        # torch's stubs do not say that gloo's class has the methods of a process group.
        fastest_exchange(
            cast(
                dist.ProcessGroup,
                dist.ProcessGroupGloo(dist.PrefixStore(purpose, store), rank, world_size, timeout),
            ),
            timeout_seconds,
        )
        for purpose in ("gathers", "reductions")
    )
    return Collectives(rank, world_size, gathers, reductions, wire)


def _shared_name(parent: dist.ProcessGroup) -> str:
    """A name that no other engine has, the same on all ranks of ``parent``."""
    name = torch.tensor([uuid.uuid4().int >> 65], dtype=torch.int64)
    dist.broadcast(name, group=parent, group_src=0)
    return f"zero_ext/{int(name):x}"


def alone() -> Collectives:
    """The collectives of a single rank."""
    return Collectives(0, 1, _NoPeers(), _NoPeers(), WireLog())


class _NoPeers:
    """The exchange of a single rank: nothing is ever sent."""

    def start(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int = 0
    ) -> Sequence[Waitable]:
        return []

    def all_reduce(self, tensor: torch.Tensor) -> Waitable:
        raise AssertionError("one rank has nobody to reduce with")

    def give_up(self, reason: str) -> None:
        return None
