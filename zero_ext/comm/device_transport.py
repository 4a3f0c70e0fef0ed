"""Transport through a backend that runs on the device itself, in the order of its streams: NCCL."""

from __future__ import annotations

import contextlib
import datetime
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from zero_ext.comm.transport import Transport, Waitable


class DeviceTransport(Transport):
    """Transport over the collectives of a device's backend, for its use alone.

    Waiting makes the current stream wait, not the host. Shards for a sum go by all-to-all, which NCCL makes
    of sends and receives, so that the receiver adds them in rank order and float32;
    :meth:`reduce_scatter` leaves the adding to the backend. There are no tags: ranks at different places hang
    until the backend's time-out.

    The connections are shut down with this object, if it ``owns`` them.
    """

    rings = True

    def __init__(self, backend: Any, owns: bool = True) -> None:
        super().__init__(int(backend.rank()), int(backend.size()))
        self._connections: Any = backend
        self._reason = ""
        # Also at interpreter exit: the backend's threads must have ended by then.
        self._shutdown = weakref.finalize(self, _shut_down, backend) if owns else None

    @property
    def _backend(self) -> Any:
        if self._connections is None:
            raise RuntimeError(self._reason)
        return self._connections

    def gather(self, flat: torch.Tensor, tag: int = 0) -> Sequence[Waitable]:
        """All-gather in place."""
        numel = flat.numel() // self.world_size
        return [self._backend._allgather_base(flat, flat.narrow(0, self.rank * numel, numel))]

    def all_to_all(
        self, receives: Sequence[torch.Tensor], sends: Sequence[torch.Tensor], tag: int = 0
    ) -> Sequence[Waitable]:
        """Exchange all tensors in one call of the backend."""
        return [self._backend.alltoall(self._without_own(receives), self._without_own(sends))]

    def _without_own(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        # Nothing is sent for an empty tensor; one's own would be copied.
        return [each[:0] if rank == self.rank else each for rank, each in enumerate(tensors)]

    def broadcast(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Sequence[Waitable]:
        """Broadcast by the backend."""
        return [self._backend.broadcast(tensor, source)]

    def all_reduce(self, tensor: torch.Tensor, tag: int = 0) -> Waitable:
        """Sum in the backend's order."""
        work: Waitable = self._backend.allreduce([tensor])
        return work

    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor) -> Sequence[Waitable]:
        """Sum in the backend's order."""
        return [self._backend._reduce_scatter_base(out, flat)]

    def abort(self, reason: str) -> None:
        """Abort what this rank has under way. Peers fail by their time-out, or sooner over the host."""
        backend, self._connections, self._reason = self._connections, None, reason
        if backend is not None:
            if self._shutdown is not None:
                self._shutdown.detach()
            backend.abort()

    def connect(self, device: torch.device) -> None:
        """Open the connections of ``device``, which backends do at their first collective otherwise.

        Raises whatever the backend raises where they do not form. The host waits for the device, first for
        what was queued before: collectives over other connections, of an engine before this one, must not
        run before the first of these on one rank and after it on another.
        """
        torch.accelerator.synchronize(device)
        self.all_reduce(torch.zeros(1, device=device)).wait()
        torch.accelerator.synchronize(device)


def _shut_down(backend: Any) -> None:
    # A backend whose device is lost has nothing left to end.
    with contextlib.suppress(RuntimeError):
        backend.shutdown()


def can_make(backend: str) -> bool:
    """Return whether :func:`make_backend` supports ``backend``."""
    return backend == "nccl" or backend.upper() in dist.Backend._plugins


def make_backend(
    backend: str, store: dist.Store, rank: int, world_size: int, timeout_seconds: float, ranks: Sequence[int]
) -> Any:
    """Return connections of a ``backend`` of torch's that nobody else uses, made by all ranks.

    They are in none of torch's registries, so they end with the last reference to them. A collective of NCCL
    that has not ended after ``timeout_seconds`` ends the process, with its name on stderr.

    Args:
        backend: "nccl", or the name of one that was registered with ``torch.distributed.Backend``.
        ranks: The ranks of the group in the world.
    """
    timeout = datetime.timedelta(seconds=timeout_seconds)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, world_size, options)
    plugin = dist.Backend._plugins[backend.upper()]
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, world_size, timeout)
    backend_options = torch._C._distributed_c10d._DistributedBackendOptions()
    backend_options.store, backend_options.timeout, backend_options.group_id = store, timeout, "zero_ext"
    backend_options.group_rank, backend_options.group_size = rank, world_size
    backend_options.global_ranks_in_group = list(ranks)
    return plugin.creator_fn(backend_options, None)
