"""A transport under which every race shows: late transfers and reads, results poisoned until waited for."""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch

from zero_ext.comm import fastest_host_transport
from zero_ext.comm.transport import PeerPayload, PointToPointTransport, Waitable


def poison(tensor: torch.Tensor) -> None:
    """Overwrites ``tensor`` with what no computation survives unseen."""
    tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)


class DelayedTransport(PointToPointTransport):
    """Runs another exchange on a thread of its own, after random delays, through private buffers.

    A destination holds poison from ``start`` until its ``wait``; a source is read at some time in between,
    so that a caller who changes it too early sends the wrong values.
    """

    def __init__(self, inner: PointToPointTransport, seed: int, longest: float = 0.002) -> None:
        super().__init__(inner.rank, inner.world_size)
        self._inner = inner
        self._random = random.Random(seed)
        self._longest = longest
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue()
        threading.Thread(target=_work_off, args=(self._queue,), daemon=True).start()

    def start(
        self, sends: Sequence[PeerPayload], receives: Sequence[PeerPayload], tag: int = 0
    ) -> Sequence[Waitable]:
        """See :class:`Transport`."""
        private = [(rank, torch.empty_like(tensor)) for rank, tensor in receives]
        for _, tensor in receives:
            poison(tensor)

        def transfer() -> None:
            for work in self._inner.start(sends, private, tag):
                work.wait()

        targets = [tensor for _, tensor in receives]
        return [self._later(transfer, targets, [tensor for _, tensor in private])]

    def abort(self, reason: str) -> None:
        """See :class:`Transport`."""
        self._inner.abort(reason)

    def _later(
        self, transfer: Callable[[], Any], targets: list[torch.Tensor], results: list[torch.Tensor]
    ) -> Waitable:
        work = _Work(targets, results)

        def run() -> None:
            time.sleep(self._random.uniform(0, self._longest))
            try:
                transfer()
            except Exception as error:
                work.error = error
            work.ready.set()

        self._queue.put(run)
        return work

    def __del__(self) -> None:
        self._queue.put(None)


def _work_off(tasks: queue.Queue[Callable[[], None] | None]) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task


class _Work:
    def __init__(self, targets: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        self.ready = threading.Event()
        self.error: Exception | None = None
        self._targets, self._results = targets, results

    def wait(self) -> None:
        if not self.ready.wait(60):
            raise RuntimeError("the delayed transfer never ended")
        if self.error is not None:
            raise self.error
        for target, result in zip(self._targets, self._results, strict=True):
            target.copy_(result)


@contextlib.contextmanager
def delays(seed: int) -> Iterator[None]:
    """Inside, every engine that is prepared runs over delayed exchanges."""

    def delayed(group: Any, timeout_seconds: float) -> DelayedTransport:
        return DelayedTransport(fastest_host_transport(group, timeout_seconds), seed)

    with mock.patch("zero_ext.comm.process_group.fastest_host_transport", delayed):
        yield
