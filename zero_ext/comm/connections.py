"""The connections between the ranks of an engine: the path of a device's tensors, and connections for it."""

from __future__ import annotations

import datetime
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.distributed as dist

from zero_ext.comm.cross_process_transport import fastest_host_transport
from zero_ext.comm.device_transport import DeviceTransport, can_make, make_backend
from zero_ext.comm.host_staged_transport import HostStagedTransport
from zero_ext.comm.node_map import NodeMap
from zero_ext.comm.point_to_point_transport import PointToPointTransport
from zero_ext.comm.transport import DeviceDispatch, Transport, TransportSelector
from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.config.sections.communication import Reduction, ResolvedReduction, resolve_reduction

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
        # N numbers are equal exactly if the square of their sum is N times the sum of their
        # squares. With 20 bits each, the sums stay within int64.
        number = zlib.crc32(fact.encode()) % (1 << 20)
        sums = torch.tensor([number, number**2, int(bool(problem))], dtype=torch.int64, device="cpu")
        host.all_reduce(sums).wait()
        total, squares, problems = sums.tolist()
        if not problems and total**2 == squares * self.world_size:
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
