"""A persistent pool of ranks: processes that import torch once and then run every multi-rank test."""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import multiprocessing
import secrets
import signal
import tempfile
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, ClassVar

import torch

from tests.accelerator.build import library
from tests.multi.rank import RankTask, serve

POOL_SIZE = 4
# Far more than any test takes: on a loaded machine all is slow by a multiple, and this only ends what hangs.
LIMIT_SECONDS = 400.0
GRACE_SECONDS = 10.0  # for the other ranks to report as well, once one has failed
# Torch keeps the groups of every mesh for the life of the process, each with two threads and open sockets.
# Ended, they would be missed by DTensor's caches.
MOST_GROUPS = 64
# A rank that has run tests of a large library holds some 200 MB. A pool starts again within a second or two.
MOST_RANKS = 8
_PRELOADED = ["torch", "torch.distributed", "torch._dynamo", "zero_ext", "zero_ext.zero", "pytest"]


class RankFailure(AssertionError):
    """A test body raised, died or hung on some rank; the message holds every rank's traceback."""


def preload(*modules: str) -> None:
    """Import ``modules`` once for the ranks of all pools.

    For conftest files, as it has no effect once a pool has started.
    """
    _PRELOADED.extend(each for each in modules if each not in _PRELOADED)


class RankPool:
    """``size`` processes in one world of ``backend``, started at first use and again after any failure, when
    their tests have left many process groups, and when other pools needed their memory: one test process has
    ``MOST_RANKS`` ranks at most, but for a single larger pool.

    Work is named ``module:function``; its arguments are JSON-able, its results JSON-able or tensors. A call
    runs on the first ``world_size`` ranks, which form a group of their own. Whoever has no work is stopped,
    threads of gloo included, so that idle pools cost no time. With ``stand_in`` every process has the
    stand-in accelerator (tests/accelerator).
    """

    _running: ClassVar[list[RankPool]] = []  # the one used last at the end

    def __init__(self, size: int = POOL_SIZE, stand_in: bool = False, backend: str = "gloo") -> None:
        self.size = size
        self.stand_in = stand_in
        self.backend = backend
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*_PRELOADED, "tests.multi.preloaded"])
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._tasks = 0
        # Before multiprocessing's own end, which waits for processes that may be stopped.
        atexit.register(self.close)

    def run(
        self,
        world_size: int,
        target: str,
        arguments: dict[str, Any],
        timeout: float = LIMIT_SECONDS,
        seed: int | None = None,
    ) -> list[Any]:
        """Results of ``target`` on each of ``world_size`` ranks; raises :class:`RankFailure`."""
        if not 1 <= world_size <= self.size:
            raise ValueError(f"world_size: {world_size} given, 1 to {self.size} wanted")
        self._make_ready()
        seed = secrets.randbits(31) if seed is None else seed
        self._tasks += 1
        task = RankTask(target, arguments, world_size, seed, self._tasks)
        message = json.dumps(task._asdict()).encode()
        pending = {self._connections[rank]: rank for rank in range(world_size)}
        for connection, rank in pending.items():
            self._signal(rank, signal.SIGCONT)
            connection.send_bytes(message)
        results, failures = self._collect(pending, timeout)
        if failures:
            self.close()
            listed = "\n".join(f"--- rank {rank} ---\n{failures[rank]}" for rank in sorted(failures))
            raise RankFailure(
                f"{target} failed on ranks {sorted(failures)} of {world_size} (seed {seed})\n{listed}"
            )
        if max(answer["groups"] for answer in results.values()) > MOST_GROUPS:
            self.close()
        else:
            self._stop(world_size)
        return [results[rank]["result"] for rank in range(world_size)]

    def close(self) -> None:
        """Ends all ranks; the next call starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        if self in self._running:
            self._running.remove(self)
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _make_ready(self) -> None:
        """Starts the ranks if there are none, after the end of those of other pools that leave no room."""
        if self in self._running:
            self._running.remove(self)
        while self._running and self.size + sum(each.size for each in self._running) > MOST_RANKS:
            self._running[0].close()
        if not self._processes:
            self._start()
        self._running.append(self)

    def _start(self) -> None:
        if self.stand_in:
            library()  # built before the ranks' time to start runs
        self._folder = tempfile.TemporaryDirectory(prefix="ranks")
        for rank in range(self.size):
            parent_end, child_end = self._context.Pipe()
            arguments = (rank, self.size, self._folder.name, child_end, self.stand_in, self.backend)
            process = self._context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            child_end.close()
            self._processes.append(process)
            self._connections.append(parent_end)
        for rank, connection in enumerate(self._connections):
            if not connection.poll(LIMIT_SECONDS):
                raise RankFailure(f"rank {rank} of the pool did not start within {LIMIT_SECONDS} s")
            connection.recv_bytes()
        self._stop(self.size)

    def _stop(self, count: int) -> None:
        """Stop the first ``count`` ranks until they have work again."""
        for rank in range(count):
            self._signal(rank, signal.SIGSTOP)

    def _signal(self, rank: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._processes[rank]._popen._send_signal(number)

    def _collect(
        self, pending: dict[Connection, int], timeout: float
    ) -> tuple[dict[int, dict[str, Any]], dict[int, str]]:
        results: dict[int, dict[str, Any]] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        # The machine itself may have stood still until past the deadline: then the ranks get a moment more.
        patience = min(timeout, GRACE_SECONDS)
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready and patience and not failures:
                deadline, patience = time.monotonic() + patience, 0.0
                continue
            if not ready:
                for rank in pending.values():
                    failures[rank] = f"no answer within the time limit; it stood at{self._where(rank)}"
                break
            for connection in ready:
                rank = pending.pop(connection)  # type: ignore[arg-type]
                try:
                    answer = torch.load(io.BytesIO(connection.recv_bytes()), weights_only=True)  # type: ignore[union-attr]
                except (EOFError, OSError):
                    self._processes[rank].join(GRACE_SECONDS)
                    failures[rank] = (
                        f"the process died, exit code {self._processes[rank].exitcode}{self._stacks(rank)}"
                    )
                    answer = {}
                if "error" in answer:
                    failures[rank] = answer["error"]
                elif rank not in failures:
                    results[rank] = answer
                if failures:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return results, failures

    def _where(self, rank: int) -> str:
        """Python stacks of a rank that does not answer."""
        self._signal(rank, signal.SIGUSR1)
        time.sleep(0.2)
        return self._stacks(rank)

    def _stacks(self, rank: int) -> str:
        """The stacks that the rank has written, after a fatal signal or when asked."""
        dump = Path(self._folder.name) / f"stacks-{rank}" if self._folder is not None else None
        return f"\n{dump.read_text()}" if dump is not None and dump.exists() else ""
