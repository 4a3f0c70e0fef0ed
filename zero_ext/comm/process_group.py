"""The ranks of an engine: their process group, their connections, and the path of a device's tensors."""

from __future__ import annotations

import datetime
import logging
import os
import uuid
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, cast

import torch
import torch.distributed as dist

from zero_ext.comm import Collectives, TrafficStats
from zero_ext.comm.cross_process_transport import fastest_host_transport
from zero_ext.comm.device_transport import DeviceTransport, can_make, make_backend
from zero_ext.comm.flight_recorder import FlightRecorder
from zero_ext.comm.hierarchical import NodeMap, nodes_of
from zero_ext.comm.host_staged_transport import HostStagedTransport
from zero_ext.comm.transport import (
    DeviceDispatch,
    PointToPointTransport,
    Transport,
    TransportSelector,
    Waitable,
    all_equal,
)
from zero_ext.config.communication import Reduction, ResolvedReduction, resolve_reduction
from zero_ext.config.internal_error import zero_ext_bug

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
    found = Collectives(
        gathers,
        reductions,
        TrafficStats(),
        nodes,
        recorder,
        ranks=ranks,
        reduction=added,
        in_one_order=path.kind == "backend",
    )
    found.reconnect = partial(make_collectives, group, timeout_seconds, ranks_per_node=ranks_per_node)
    return found


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
    found = Collectives(
        transport,
        transport,
        TrafficStats(),
        nodes,
        ranks=ranks,
        reduction=reduction,
        in_one_order=path.device.type != "cpu",
    )
    found.reconnect = partial(_simulated, parent, ranks, TransferPath("fake", CPU), "rank_order", nodes)
    return found


def _same_on_all_ranks(transport: Transport, value: int) -> bool:
    """Return whether all ranks give the same ``value``."""
    sums = torch.tensor([value, value * value], dtype=torch.int64, device="cpu")
    transport.all_reduce(sums).wait()
    total, squares = sums.tolist()
    return all_equal(total, squares, transport.world_size)


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
    found = Collectives(_NoPeers(0, 1), _NoPeers(0, 1), TrafficStats(), nodes, ranks=[own])
    found.reconnect = partial(single_rank, ranks_per_node)
    return found


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


# Tensors that a call of ops.sum_shards_ adds up on CUDA: their addresses travel with the launch.
MOST_SHARDS_ON_A_DEVICE = 256
HOW_ADDED: dict[ResolvedReduction, str] = {
    "rank_order": "in rank order and float32",
    "node_order": "in rank order and float32 inside each node, then over the nodes in their order",
    "backend": "by the backend",
}


@dataclass(frozen=True)
class TransferPath:
    """The path of tensors on ``device`` between the ranks of a group: over the "host" because they are there,
    "staged" through it, by a ``backend`` of the device's, or nowhere because the ranks are simulated
    ("fake"). ``problem`` says why they cannot, or nothing."""

    kind: Literal["host", "staged", "backend", "fake"]
    device: torch.device
    backend: str = ""
    problem: str = ""

    @staticmethod
    def of(offered: str, device: torch.device) -> TransferPath:
        """Return the path that a group with the backends ``offered`` ("cpu:gloo,cuda:nccl") leaves."""
        backends = dict(each.split(":", 1) for each in offered.split(","))
        if "fake" in backends.values():
            return TransferPath("fake", device)
        if device.type == "cpu":
            return TransferPath("host", device)
        backend = backends.get(device.type, "gloo")
        if backend == "gloo":
            return TransferPath("staged", device)
        problem = ""
        if not can_make(backend):
            problem = (
                f"process_group: expected nccl, gloo, or a backend that was registered with "
                f"torch.distributed.Backend.register_backend, got '{backend}' for {device.type}. Start "
                f"torch.distributed with one of these; with gloo the host carries what is on {device.type}."
            )
        return TransferPath("backend", device, backend, problem)

    def described(self) -> str:
        """Return what must be the same on all ranks."""
        over = {"backend": self.backend, "staged": "host memory"}.get(self.kind)
        return self.device.type if over is None else f"{self.device.type} over {over}"

    def summary(self) -> str:
        """Return one sentence on the path, for the log."""
        if self.kind == "staged":
            return (
                f"the process group has no backend for {self.device}: what the ranks exchange goes through "
                "host memory"
            )
        return f"tensors of the ranks are on {self.described()}"

    def resolve(self, wanted: Reduction, nodes: NodeMap) -> ResolvedReduction:
        """Return how gradients are added up, as ``config.communication.resolve_reduction`` says it."""
        adds = self.device.type != "cpu" and self.kind in ("backend", "fake")
        most = None if self.device.type == "cpu" else MOST_SHARDS_ON_A_DEVICE
        return resolve_reduction(wanted, nodes.world_size, nodes.ranks_per_node, most, adds)


@dataclass(frozen=True)
class Connections:
    """Makes transports that nobody else uses, in collective calls of all ranks."""

    store: dist.Store
    rank: int
    world_size: int
    timeout_seconds: float
    path: TransferPath
    ranks: Sequence[int]

    def over_host(self, purpose: str) -> PointToPointTransport:
        """For tensors of the host."""
        timeout = datetime.timedelta(seconds=self.timeout_seconds)
        # gloo's groups meet under fixed keys of their store, so each needs a prefix of its own.
        store = dist.PrefixStore(purpose, self.store)
        gloo = dist.ProcessGroupGloo(store, self.rank, self.world_size, timeout)
        # torch's stubs do not say that gloo's class has the methods of a process group.
        return fastest_host_transport(cast(dist.ProcessGroup, gloo), self.timeout_seconds)

    def with_device(
        self, gathers: PointToPointTransport, reductions: PointToPointTransport
    ) -> tuple[TransportSelector, TransportSelector]:
        """``gathers`` and ``reductions`` for tensors of the device too.

        A backend has one set of connections for both. NCCL asks that several be used in the same order on all
        ranks, and then one does the same with half of the memory.
        """
        if self.path.kind == "backend":
            backend = self._over_backend(reductions)
            return DeviceDispatch(gathers, backend), DeviceDispatch(reductions, backend)
        if self.path.kind == "staged":
            # Host tensors have connections of their own: a thread moves the others, at times of its own.
            return self._staged(gathers, "gathers"), self._staged(reductions, "reductions")
        return gathers, reductions

    def _staged(self, host: PointToPointTransport, purpose: str) -> TransportSelector:
        return DeviceDispatch(
            host, HostStagedTransport(self.over_host(f"staged {purpose}"), self.path.device)
        )

    def _over_backend(self, host: Transport) -> DeviceTransport:
        store, problem = dist.PrefixStore(self.path.backend, self.store), ""
        made: DeviceTransport | None = None
        try:
            arguments = (self.rank, self.world_size, self.timeout_seconds, self.ranks)
            made = DeviceTransport(make_backend(self.path.backend, store, *arguments))
            made.connect(self.path.device)
        except Exception as error:
            problem = (
                f"{self.path.described()}: the connections of the ranks did not form: {error}. Give every "
                "rank a device of its own before prepare, torch.accelerator.set_device_index(LOCAL_RANK)."
            )
        try:
            # The ranks agree over the host because the backend may have failed. Without an
            # agreement, ranks that did connect would wait for this one until the time-out.
            self.agree(host, "connections", "", problem, RuntimeError)
        except RuntimeError as error:
            if made is not None:
                made.abort(str(error))
            raise
        if made is None:
            raise zero_ext_bug("the ranks agreed on connections that were not made")
        return made

    def agree(self, host: Transport, what: str, fact: str, problem: str, kind: type[Exception]) -> None:
        """Raise an error of ``kind`` on all ranks if one has a ``problem``, or not the ``fact`` of others."""
        number = zlib.crc32(fact.encode()) % (1 << 20)
        sums = torch.tensor([number, number**2, int(bool(problem))], dtype=torch.int64, device="cpu")
        host.all_reduce(sums).wait()
        total, squares, problems = sums.tolist()
        if not problems and all_equal(total, squares, self.world_size):
            return
        store = dist.PrefixStore(what, self.store)
        # All ranks wait for the entries of all, so a rank without a problem writes an empty one.
        store.set(str(self.rank), problem or ("" if problems else fact))
        found: dict[str, list[int]] = {}
        for rank in range(self.world_size):
            store.wait([str(rank)], datetime.timedelta(seconds=self.timeout_seconds))
            if text := store.get(str(rank)).decode():
                found.setdefault(text, []).append(rank)
        if problems:
            raise kind("; ".join(f"{_named(ranks)}: {text}" for text, ranks in found.items()))
        listed = ", ".join(f"{text} on {_named(ranks)}" for text, ranks in found.items())
        raise kind(
            "model: expected parameters on one kind of device, and a process group of one backend for it, on "
            f"all ranks, got {listed}. Move the model to the same kind of device everywhere, and start "
            "torch.distributed alike."
        )


def _named(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {listed}"
