"""Process groups of an engine: taken from the caller, from torchrun's environment, or none for one rank."""

from __future__ import annotations

import datetime
import logging
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.distributed as dist

from zero_ext.comm import (
    Collectives,
    Exchange,
    ExchangeByDevice,
    GroupExchange,
    PointToPoint,
    StagedExchange,
    WireLog,
    fastest_exchange,
    nccl_exchange,
)
from zero_ext.comm.exchange import Message, Waitable
from zero_ext.comm.flight_recorder import FlightRecorder
from zero_ext.comm.node_map import NodeMap, nodes_of

Reduction = Literal["rank_order", "backend"]
_Way = Literal["host", "nccl", "staged", "fake"]
CPU = torch.device("cpu")
# Device tensors a call of ops.sum_shards_ adds up on CUDA.
MOST_SHARDS_ON_CUDA = 256
_log = logging.getLogger(__name__)


def join_world(timeout_seconds: float) -> None:
    """Starts torch.distributed if a launcher (torchrun) set the environment and nobody did yet: with gloo,
    and NCCL beside it where there is CUDA.

    NCCL then ends a job whose ranks wait for each other longer than ``timeout_seconds``, unless the
    environment says something else.
    """
    if not dist.is_available() or dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    backend = "gloo"
    if torch.cuda.is_available() and dist.is_nccl_available():
        backend = "cpu:gloo,cuda:nccl"
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_seconds))


def make_collectives(
    group: dist.ProcessGroup | None,
    timeout_seconds: float,
    device: torch.device = CPU,
    *,
    reduction: Reduction = "rank_order",
    checks_nan: bool = False,
    ranks_per_node: int | None = None,
) -> Collectives:
    """Collectives over ``group`` (default: the world) for tensors in host memory and on ``device``, on
    connections of their own; a collective call.

    Without torch.distributed, one rank. ``reduction`` "backend" lets NCCL add gradients up; ``checks_nan``
    lets it look for NaN among gathered values. ``ranks_per_node``: how many consecutive ranks share a node,
    by default what a launcher said. Only the group's ranks and its store are used, so it may have any
    backend. Raises ``ValueError`` for more ranks than can be added in rank order, and for nodes that the
    ranks do not fill.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return alone(ranks_per_node)
    parent = group if group is not None else dist.group.WORLD
    if parent is None:
        raise AssertionError("torch.distributed runs without a default group")
    ranks = dist.get_process_group_ranks(parent)
    rank, world_size = dist.get_rank(group), len(ranks)
    if rank < 0:
        raise ValueError(f"rank {dist.get_rank()} is not a member of the process group given, ranks {ranks}")
    if world_size == 1:
        return alone(ranks_per_node)
    way = _way(dist.get_backend_config(group), device)
    added_here = way != "fake" and device.type == "cuda" and reduction == "rank_order"
    if added_here and world_size > MOST_SHARDS_ON_CUDA:
        raise ValueError(
            f"{world_size} ranks: gradients of at most {MOST_SHARDS_ON_CUDA} are added in rank order on "
            "CUDA; set 'precision.reduction' to 'backend'"
        )
    nodes = nodes_of(ranks, rank, dist.get_world_size(), ranks_per_node)
    if way == "fake":
        exchanges = (GroupExchange(parent), GroupExchange(parent))
        return Collectives(rank, world_size, *exchanges, WireLog(), nodes, ranks=ranks)
    if way == "staged" and rank == 0:
        _log.info(
            "the process group has no backend for %s: what the ranks exchange goes through host memory",
            device,
        )
    # Not dist.new_group: its local names differ between ranks that belong to different numbers of groups, and
    # it keeps every group for the life of the process.
    store = _own_store(parent, rank, timeout_seconds)
    recorder = FlightRecorder(rank, dist.PrefixStore("records", store))
    made = _Connections(store, rank, world_size, timeout_seconds, device)
    gathers = made.exchange("gathers", way, False, checks_nan)
    reductions = made.exchange("reductions", way, reduction == "backend", False)
    if ranks_per_node is None and not _alike(reductions, nodes.ranks_per_node):
        nodes = NodeMap(rank, world_size, world_size)
    return Collectives(rank, world_size, gathers, reductions, WireLog(), nodes, recorder, ranks=ranks)


def _alike(exchange: Exchange, value: int) -> bool:
    """Whether all ranks give the same ``value``."""
    sums = torch.tensor([value, value * value], dtype=torch.int64, device="cpu")
    exchange.all_reduce(sums).wait()
    total, squares = sums.tolist()
    return bool(total * total == squares * exchange.world_size)


@dataclass(frozen=True)
class _Connections:
    """Makes exchanges that nobody else uses, each by all ranks together."""

    store: dist.Store
    rank: int
    world_size: int
    timeout_seconds: float
    device: torch.device

    def exchange(self, purpose: str, way: _Way, sums: bool, checks_nan: bool) -> Exchange:
        """For tensors of host and device."""
        host = self._over_host(purpose)
        if way == "host":
            return host
        if way == "staged":
            # Host tensors have connections of their own: a thread moves the others, at times of its own.
            return ExchangeByDevice(host, StagedExchange(self._over_host(f"staged {purpose}"), self.device))
        store = dist.PrefixStore(f"nccl {purpose}", self.store)
        nccl = nccl_exchange(
            store, self.rank, self.world_size, self.timeout_seconds, sums=sums, checks_nan=checks_nan
        )
        return ExchangeByDevice(host, nccl)

    def _over_host(self, purpose: str) -> PointToPoint:
        timeout = datetime.timedelta(seconds=self.timeout_seconds)
        store = dist.PrefixStore(purpose, self.store)
        gloo = dist.ProcessGroupGloo(store, self.rank, self.world_size, timeout)
        # torch's stubs do not say that gloo's class has the methods of a process group.
        return fastest_exchange(cast(dist.ProcessGroup, gloo), self.timeout_seconds)


def _way(offered: str, device: torch.device) -> _Way:
    """How tensors on ``device`` travel between the ranks of a group with the backends ``offered``."""
    if "fake" in offered:
        return "fake"
    if device.type == "cpu":
        return "host"
    return "nccl" if device.type == "cuda" and "nccl" in offered else "staged"


def _own_store(parent: dist.ProcessGroup, rank: int, timeout_seconds: float) -> dist.Store:
    """A part of the store of ``parent`` that no other engine has, the same on all of its ranks.

    Rank 0 names it. The name goes through the store, as the group's backend may serve no tensor that is here.
    """
    shared = dist.PrefixStore("zero_ext", parent.get_group_store())
    number = shared.add(f"made by {rank}", 1)
    if rank == 0:
        shared.set(f"name {number}", uuid.uuid4().hex)
    key = f"name {number}"
    shared.wait([key], datetime.timedelta(seconds=timeout_seconds))
    return dist.PrefixStore(shared.get(key).decode(), shared)


def alone(ranks_per_node: int | None = None) -> Collectives:
    """The collectives of a single rank. Raises ``ValueError`` for a node of several."""
    nodes = NodeMap(0, 1, ranks_per_node or 1)
    own = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    return Collectives(0, 1, _NoPeers(0, 1), _NoPeers(0, 1), WireLog(), nodes, ranks=[own])


class _NoPeers(PointToPoint):
    """The exchange of a single rank: nothing is ever sent."""

    def start(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int = 0
    ) -> Sequence[Waitable]:
        return []

    def all_reduce(self, tensor: torch.Tensor) -> Waitable:
        raise AssertionError("one rank has nobody to reduce with")

    def give_up(self, reason: str) -> None:
        return None
