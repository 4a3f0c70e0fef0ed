"""Rank consensus during a save or a load: an error on one rank becomes an error on all.

Collectives are called on the backend object, which torch.distributed has not registered and so leaves alone.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from zero_ext.checkpoint.files import MOST_BYTES, CheckpointError, raw_view, shortened

_MOST_RANKS_SHOWN = 4
_BYTES_BESIDE_REASONS = 400
_USER_MISTAKES = {"ValueError": ValueError, "TypeError": TypeError}


class RankConsensus:
    """The ranks of one ``group`` (None: this process alone) in a save or load described by ``purpose``."""

    def __init__(self, rank: int, world_size: int, group: dist.ProcessGroupGloo | None, purpose: str) -> None:
        self.rank = rank
        self.world_size = world_size
        self.purpose = purpose
        self._group = group
        self._interrupted = False

    def stage(self, action: Callable[[], Any], advice: str = "") -> list[Any]:
        """Run ``action`` on every rank and return all ranks' results (JSON values), in rank order.

        If it fails on any rank, every rank raises the same error, naming the failed ranks and their reasons
        and ending in ``advice``: CheckpointError, or the ValueError or TypeError that the first of them met.
        A KeyboardInterrupt or SystemExit of one rank stays what it is there, and is an error on the others.
        """
        local: BaseException | None = None
        try:
            self.raise_interrupt()
            outcome = json.dumps([None, action()])
        except BaseException as error:
            # Whatever it is: the other ranks wait for this one, and later collectives need this one to end.
            local = error
            outcome = json.dumps([[type(error).__name__, _reason(error)], None])
        with self._interrupts_deferred():
            outcomes = [json.loads(data) for data in self._all_gather(outcome.encode())]
        if local is not None and not isinstance(local, Exception):
            raise local
        failures = {rank: failure for rank, (failure, _) in enumerate(outcomes) if failure is not None}
        if failures:
            raise self._error(failures, advice) from local
        return [value for _, value in outcomes]

    def raise_interrupt(self) -> None:
        """Raise the KeyboardInterrupt that came while this rank was in a collective, if any."""
        if self._interrupted:
            self._interrupted = False
            raise KeyboardInterrupt

    @contextmanager
    def _interrupts_deferred(self) -> Iterator[None]:
        """Defer Ctrl-C to the next stage. Between two collectives it would leave other ranks one behind."""
        main = threading.current_thread() is threading.main_thread()
        if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return

        def note(number: int, frame: FrameType | None) -> None:
            self._interrupted = True

        signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def collect(self, data: bytes) -> list[bytes]:
        """Return every rank's ``data`` in rank order on rank 0; an empty list on the others."""
        if self.world_size == 1:
            return [data]
        with self._interrupts_deferred():
            sizes = [int(size) for size in self._all_gather(str(len(data)).encode())]
            mine = _padded(data, max(sizes))
            received = [torch.empty_like(mine) for _ in sizes] if self.rank == 0 else []
            options = dist.GatherOptions()
            options.rootRank = 0
            self._run(lambda group: group.gather([received] if received else [], [mine], options))
        return [_bytes(padded)[:size] for padded, size in zip(received, sizes, strict=False)]

    def _all_gather(self, data: bytes) -> list[bytes]:
        if self.world_size == 1:
            return [data]
        length = torch.tensor([len(data)], dtype=torch.int64, device="cpu")
        lengths = [torch.empty_like(length) for _ in range(self.world_size)]
        self._run(lambda group: group.allgather([lengths], [length]))
        sizes = [int(size) for size in lengths]
        mine = _padded(data, max(sizes))
        received = [torch.empty_like(mine) for _ in sizes]
        self._run(lambda group: group.allgather([received], [mine]))
        return [_bytes(padded)[:size] for padded, size in zip(received, sizes, strict=True)]

    def _run(self, start: Callable[[Any], dist.Work]) -> None:
        if self._group is None:
            raise RuntimeError(
                f"{self.purpose}: expected a process group of {self.world_size} ranks, got None. Pass their "
                "group."
            )
        try:
            start(self._group).wait()
        except Exception as error:
            raise CheckpointError(
                f"rank {self.rank}: {self.purpose}: another rank has died or hangs: {error}. "
                "Look at the first error on the other ranks. The limit is 'timeout_seconds' in the "
                "configuration."
            ) from error

    def _error(self, failures: dict[int, list[str]], advice: str) -> Exception:
        named = list(failures.items())[:_MOST_RANKS_SHOWN]
        most_bytes = (MOST_BYTES - _BYTES_BESIDE_REASONS) // len(named)
        shown = [_sentence(f"rank {rank}: {shortened(reason, most_bytes)}") for rank, (_, reason) in named]
        if len(failures) > len(shown):
            shown.append(f"{len(failures) - len(shown)} more ranks failed.")
        first = next(iter(failures.values()))[0]
        text = " ".join([f"{self.purpose} failed:", *shown, *([_sentence(advice)] if advice else [])])
        return _USER_MISTAKES.get(first, CheckpointError)(shortened(text))


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointError | ValueError | TypeError):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _sentence(text: str) -> str:
    return text if text.endswith((".", "?", "!")) else f"{text}."


def _padded(data: bytes, size: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(data.ljust(max(size, 1), b"\0")), dtype=torch.uint8)


def _bytes(data: torch.Tensor) -> bytes:
    return bytes(raw_view(data))
