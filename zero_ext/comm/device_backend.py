"""Exchange through a backend that runs on the device itself, in the order of its streams: NCCL."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zero_ext.comm.exchange import Waitable

_NAN_CHECK = "TORCH_NCCL_NAN_CHECK"


class BackendExchange:
    """Exchange over the collectives of a device's backend, for its use alone.

    Waiting makes the current stream wait, not the host. Shards for a sum go by all-to-all, which NCCL makes
    of sends and receives, so that who receives them adds them in rank order and float32; ``sums`` leaves the
    adding to the backend. There are no tags: ranks at different places hang until the backend's time-out.
    """

    staging_bytes = 0

    def __init__(self, backend: Any, sums: bool) -> None:
        self.rank = int(backend.rank())
        self.world_size = int(backend.size())
        self._connections: Any = backend
        self._sums = sums
        self._reason = ""

    @property
    def _backend(self) -> Any:
        if self._connections is None:
            raise RuntimeError(self._reason)
        return self._connections

    def gather(self, flat: torch.Tensor, tag: int = 0) -> Sequence[Waitable]:
        """See :class:`Exchange`."""
        return [self._backend._allgather_base(flat, flat.chunk(self.world_size)[self.rank])]

    def all_to_all(
        self, receives: Sequence[torch.Tensor], sends: Sequence[torch.Tensor], tag: int = 0
    ) -> Sequence[Waitable]:
        """See :class:`Exchange`."""
        return [self._backend.alltoall(self._without_own(receives), self._without_own(sends))]

    def _without_own(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        # Nothing is sent for an empty tensor; one's own would be copied.
        return [each[:0] if rank == self.rank else each for rank, each in enumerate(tensors)]

    def broadcast(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Sequence[Waitable]:
        """See :class:`Exchange`."""
        return [self._backend.broadcast(tensor, source)]

    def all_reduce(self, tensor: torch.Tensor) -> Waitable:
        """See :class:`Exchange`."""
        work: Waitable = self._backend.allreduce([tensor])
        return work

    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor) -> Sequence[Waitable] | None:
        """See :class:`Exchange`."""
        return [self._backend._reduce_scatter_base(out, flat)] if self._sums else None

    def give_up(self, reason: str) -> None:
        """See :class:`Exchange`: what this rank has under way is aborted; peers hear of it by their time-out,
        or sooner in a collective of host tensors."""
        backend, self._connections, self._reason = self._connections, None, reason
        if backend is not None:
            backend.abort()


def nccl_exchange(
    store: dist.Store, rank: int, world_size: int, timeout_seconds: float, *, sums: bool, checks_nan: bool
) -> BackendExchange:
    """An exchange over NCCL connections of its own, made by all ranks together and opened at first use.

    A collective that has not ended after ``timeout_seconds`` ends the process, with its name on stderr.
    ``checks_nan``: the device looks for NaN in what is sent, and ends the process if there is any; unless
    the environment says something else.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = datetime.timedelta(seconds=timeout_seconds)
    with _nan_check(checks_nan):
        backend = dist.ProcessGroupNCCL(store, rank, world_size, options)
    return BackendExchange(backend, sums)


@contextlib.contextmanager
def _nan_check(checks: bool) -> Iterator[None]:
    """NCCL's process groups that are made inside look for NaN in what is sent, or do not, unless the
    environment says something else. Those made later do not inherit it: among gradients there may be NaN."""
    if _NAN_CHECK in os.environ:
        yield
        return
    os.environ[_NAN_CHECK] = str(int(checks))
    try:
        yield
    finally:
        del os.environ[_NAN_CHECK]
