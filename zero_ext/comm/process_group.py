"""Process groups of an engine: from the caller, from torchrun's environment, or none for one rank."""

from __future__ import annotations

import datetime
import logging
import os
import uuid
from collections.abc import Sequence

import torch
import torch.distributed as dist

from zero_ext.comm import Collectives, DeviceTransport, TrafficStats, Transport
from zero_ext.comm.connections import HOW_ADDED, Connections, TransferPath
from zero_ext.comm.flight_recorder import FlightRecorder
from zero_ext.comm.node_map import NodeMap, nodes_of
from zero_ext.comm.transport import Waitable
from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.config.sections.communication import Reduction, ResolvedReduction

CPU = torch.device("cpu")
_log = logging.getLogger(__name__)


def join_world(timeout_seconds: float) -> None:
    """Start torch.distributed if a launcher (torchrun) set the environment and nobody did yet: with gloo,
    and NCCL alongside where there is CUDA.

    NCCL then ends a job if its ranks wait for each other longer than ``timeout_seconds``, unless the
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
    reduction: Reduction = "auto",
    ranks_per_node: int | None = None,
) -> Collectives:
    """Return collectives over ``group`` (default: the world) for tensors in host memory and on ``device``, on
    connections of their own; a collective call.

    Without torch.distributed, one rank. ``reduction`` as in ``PrecisionConfig``. ``ranks_per_node``: how many
    consecutive ranks share a node, by default what a launcher said. Of the group only its ranks and its store
    are used, and the name of its backend for ``device``, so it may have any backend.

    Raises:
        ValueError: Ranks do not fill their nodes, are on different kinds of device, or have groups of
            different backends. Or the device's backend is none that one can make connections of, or what
            ``reduction`` asks for cannot be done. All ranks raise it.
        RuntimeError: The connections of a device did not form on some rank. All ranks raise it.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return single_rank(ranks_per_node)
    parent = group if group is not None else dist.group.WORLD
    if parent is None:
        raise zero_ext_bug("torch.distributed runs without a default group")
    ranks = dist.get_process_group_ranks(parent)
    rank, world_size = dist.get_rank(group), len(ranks)
    if rank < 0:
        raise ValueError(
            f"group: expected a process group with rank {dist.get_rank()} in it, got ranks {ranks}. Call "
            "this only on the ranks of the group, or pass the group that this rank is in."
        )
    if world_size == 1:
        return single_rank(ranks_per_node)
    path = TransferPath.of(dist.get_backend_config(group), device)
    nodes = nodes_of(ranks, rank, dist.get_world_size(), ranks_per_node)
    if path.kind == "fake":
        return _simulated(parent, ranks, path, path.resolve(reduction, nodes), nodes)
    # Not dist.new_group: its local names differ between ranks that belong to different numbers of groups, and
    # it keeps every group for the life of the process.
    store = _own_store(parent, rank, timeout_seconds)
    made = Connections(store, rank, world_size, timeout_seconds, path, ranks)
    host_gathers, host_reductions = made.over_host("gathers"), made.over_host("reductions")
    # The ranks agree before the device's connections are made. On different paths they would wait
    # for each other there.
    made.agree(host_reductions, "paths", path.described(), path.problem, ValueError)
    # The number comes from each rank's environment, and nodes may have different sizes. Ranks with
    # different maps would add gradients in different orders and exchange them with other ranks.
    if ranks_per_node is None and not _same_on_all_ranks(host_reductions, nodes.ranks_per_node):
        nodes = NodeMap(rank, world_size, world_size)
    added = path.resolve(reduction, nodes)
    if rank == 0:
        _log.info("%s; gradients of %s are added %s", path.summary(), nodes.summary(), HOW_ADDED[added])
    gathers, reductions = made.with_device(host_gathers, host_reductions)
    recorder = FlightRecorder(rank, dist.PrefixStore("records", store))
    return Collectives(
        gathers,
        reductions,
        TrafficStats(),
        nodes,
        recorder,
        ranks=ranks,
        reduction=added,
        in_one_order=path.kind == "backend",
    )


def _simulated(
    parent: dist.ProcessGroup,
    ranks: Sequence[int],
    path: TransferPath,
    reduction: ResolvedReduction,
    nodes: NodeMap,
) -> Collectives:
    """Return the collectives of one rank among simulated ones, which answer nothing: one call of the group's
    backend each, as of any backend that has collectives of its own.
    """
    transport = _FakeBackendTransport(parent._get_backend(CPU), owns=False)
    return Collectives(
        transport,
        transport,
        TrafficStats(),
        nodes,
        ranks=ranks,
        reduction=reduction,
        in_one_order=path.device.type != "cpu",
    )


def _same_on_all_ranks(transport: Transport, value: int) -> bool:
    """Return whether all ranks give the same ``value``."""
    # N numbers are equal exactly if the square of their sum is N times the sum of their squares.
    sums = torch.tensor([value, value * value], dtype=torch.int64, device="cpu")
    transport.all_reduce(sums).wait()
    total, squares = sums.tolist()
    return bool(total * total == squares * transport.world_size)


def _own_store(parent: dist.ProcessGroup, rank: int, timeout_seconds: float) -> dist.Store:
    """Return a part of the store of ``parent`` that no other engine has, the same on all of its ranks.

    Rank 0 names it. The name goes through the store, as the group's backend may serve no tensor that is here.
    """
    shared = dist.PrefixStore("zero_ext", parent.get_group_store())
    # All ranks of a group make its engines in the same order, so each rank's own count of them is
    # the same number on all.
    number = shared.add(f"made by {rank}", 1)
    if rank == 0:
        shared.set(f"name {number}", uuid.uuid4().hex)
    key = f"name {number}"
    shared.wait([key], datetime.timedelta(seconds=timeout_seconds))
    return dist.PrefixStore(shared.get(key).decode(), shared)


def single_rank(ranks_per_node: int | None = None) -> Collectives:
    """Return the collectives of a single rank. Raises ``ValueError`` for a node of several."""
    nodes = NodeMap(0, 1, ranks_per_node or 1)
    own = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    return Collectives(_NoPeers(0, 1), _NoPeers(0, 1), TrafficStats(), nodes, ranks=[own])


class _FakeBackendTransport(DeviceTransport):
    """The transport of one rank among simulated ones."""

    def all_to_all(
        self, receives: Sequence[torch.Tensor], sends: Sequence[torch.Tensor], tag: int = 0
    ) -> Sequence[Waitable]:
        # Instead of what another rank sends, torch's backend copies what goes to it. Where the shapes
        # differ, nothing is copied.
        fits = [one.shape == other.shape for one, other in zip(receives, sends, strict=True)]
        matching_receives, matching_sends = (
            [each if fit else each[:0] for each, fit in zip(many, fits, strict=True)]
            for many in (receives, sends)
        )
        return super().all_to_all(matching_receives, matching_sends, tag)


class _NoPeers(Transport):
    """The transport of a single rank. Nothing is ever sent."""

    def all_to_all(
        self, receives: Sequence[torch.Tensor], sends: Sequence[torch.Tensor], tag: int = 0
    ) -> Sequence[Waitable]:
        return ()

    def abort(self, reason: str) -> None:
        return None
