"""Point-to-point exchange between the ranks of a group: the transport under every collective on gloo."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

Message = tuple[int, torch.Tensor]  # rank within the group, contiguous tensor


class Waitable(Protocol):
    """What a transport returns: something to wait for (``torch.distributed.Work`` is one)."""

    def wait(self) -> object:
        """Blocks until the transfer is complete; raises if it failed."""


class Exchange(Protocol):
    """Sends and receives whole tensors between ranks; received data is valid only after ``wait``."""

    def start(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int = 0
    ) -> Sequence[Waitable]:
        """Begins all transfers. Tensors stay untouched by the caller until every result was waited for.

        ``tag`` (31 bits) names what is moved: ranks that are not at the same place get an error, not each
        other's data.
        """

    def all_reduce(self, tensor: torch.Tensor) -> Waitable:
        """Begins an in-place sum of a small tensor over the group."""

    def give_up(self, reason: str) -> None:
        """Ends this rank's part: the other ranks' transfers with it fail, where it can be without their
        time-out, and so does whatever it starts from now on."""


class GroupExchange:
    """Exchange over a process group or backend that has send and receive (gloo), for its use alone."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._connections: dist.ProcessGroup | None = group
        self._reason = ""

    @property
    def _group(self) -> dist.ProcessGroup:
        if self._connections is None:
            raise RuntimeError(self._reason)
        return self._connections

    def start(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int = 0
    ) -> Sequence[Waitable]:
        """Posts receives before sends, so that arriving data finds its destination."""
        works = [self._group.recv([tensor], rank, tag) for rank, tensor in receives]
        works += [self._group.send([tensor], rank, tag) for rank, tensor in sends]
        return works

    def all_reduce(self, tensor: torch.Tensor) -> Waitable:
        """Sums ``tensor`` in place over the group."""
        return self._group.allreduce([tensor])

    def give_up(self, reason: str) -> None:
        """See :class:`Exchange`: connections close with the last transfer under way, and peers notice that
        they did."""
        self._connections, self._reason = None, reason


class Pending:
    """A collective under way: ``wait`` blocks for its transfers, then runs its local part once.

    Errors of the transport, when it starts and when it ends, are raised as ``RuntimeError`` naming ``label``
    (what was moved) and the rank.
    """

    def __init__(
        self,
        label: str,
        rank: int,
        start: Callable[[], Sequence[Waitable]],
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._label = label
        self._rank = rank
        self._finish = finish
        self._done = False
        self._error: RuntimeError | None = None
        with self._named_errors():
            self._works = start()

    def wait(self) -> None:
        """Blocks until the result is in place; later calls return, or raise again, at once."""
        if self._error is not None:
            raise self._error
        if self._done:
            return
        with self._named_errors():
            for work in self._works:
                work.wait()
        self._done = True
        self._works = ()
        if self._finish is not None:
            self._finish()
            self._finish = None

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._error = RuntimeError(
                f"rank {self._rank}: {self._label} failed: {error}. A peer rank has died, or it runs other "
                "collectives than this one; look at the first error on the other ranks. The limit is "
                "'timeout_seconds' in the configuration."
            )
            raise self._error from error
