"""A team: the processes of one contender, started once and driven in turn with the other teams."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from benchmarks.harness.network import Network
from benchmarks.peers import Contender

if TYPE_CHECKING:
    # A peer that imports this module must not have zero_ext in its memory, which is measured.
    from zero_ext.monitor import MemoryCap

REPOSITORY = Path(__file__).resolve().parents[2]
LOG_TAIL = 3_000
GRACE_SECONDS = 60.0  # to remove tens of gigabytes of files takes a while


class TeamFailure(RuntimeError):
    """A rank died, answered too late or raised; the message names it and carries the end of its log."""


def free_port() -> int:
    """A TCP port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(rank: int, ranks: int, threads: int, port: int) -> dict[str, str]:
    """What torchrun (and DeepSpeed's launcher) would set; one rank runs without a launcher."""
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE")
    variables = {
        **{name: value for name, value in os.environ.items() if name not in launcher},
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "DS_ACCELERATOR": "cpu",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH")))),
    }
    if ranks > 1:
        variables |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "LOCAL_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    return variables


class Team:
    """The ranks of one contender. Use as a context manager: leaving ends the processes.

    `worker` is the module they run; all of them together are held to `cap`. They run on the nodes of
    `network`, if there is one, which must have room for `ranks`.
    """

    def __init__(
        self,
        name: str,
        ranks: int,
        threads: int,
        timeout_seconds: float = 900.0,
        worker: str = "benchmarks.harness.worker",
        cap: MemoryCap | None = None,
        network: Network | None = None,
    ) -> None:
        self.name = name
        self.ranks = ranks
        self.threads = threads
        self.timeout_seconds = timeout_seconds
        self._worker = worker
        self._cap = cap
        self._network = network
        self._logs = tempfile.TemporaryDirectory(prefix="zero_ext_bench_")
        port = free_port()
        self._processes = [self._spawn(rank, port) for rank in range(ranks)]

    def _spawn(self, rank: int, port: int) -> subprocess.Popen[bytes]:
        command, variables = (
            [sys.executable, "-m", self._worker],
            environment(rank, self.ranks, self.threads, port),
        )
        if self._network is not None:
            command = [*self._network.prefix(rank), *command]
            variables |= self._network.environment(rank)
        with self._log(rank).open("wb") as log:
            return subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env=variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                preexec_fn=self._cap.enter if self._cap is not None else None,
            )

    def _log(self, rank: int) -> Path:
        return Path(self._logs.name) / f"rank{rank}.log"

    def start(self, contender: Contender, shape: str) -> list[Any]:
        """Have every rank construct `contender` on the named shape; the ranks run the standard worker."""
        return self.ask(
            "start",
            family=contender.family,
            options=contender.options,
            shape=shape,
            threads=contender.threads,
        )

    def ask(self, command: str, **arguments: Any) -> list[Any]:
        """Send one command to every rank, return their answers in rank order.

        TeamFailure, with every rank ended, if one dies, raises or is silent for `timeout_seconds`.
        """
        line = json.dumps({"do": command, **arguments}).encode() + b"\n"
        for rank, process in enumerate(self._processes):
            try:
                process.stdin.write(line)  # type: ignore[union-attr]
                process.stdin.flush()  # type: ignore[union-attr]
            except BrokenPipeError:
                raise self._failure(rank, command, "is gone") from None
        deadline = time.monotonic() + self.timeout_seconds
        answers: dict[int, Any] = {}
        while len(answers) < self.ranks:
            answers |= self._collect(command, deadline, answers)
        return [answers[rank] for rank in range(self.ranks)]

    def _collect(self, command: str, deadline: float, answered: dict[int, Any]) -> dict[int, Any]:
        streams = [process.stdout for process in self._processes if process.stdout is not None]
        waiting = {stream: rank for rank, stream in enumerate(streams) if rank not in answered}
        ready, _, _ = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            slowest = min(waiting.values())
            raise self._failure(slowest, command, f"gave no answer in {self.timeout_seconds:g} s")
        answers = {}
        for stream in ready:
            rank = waiting[stream]
            line = stream.readline()
            if not line:
                raise self._failure(rank, command, "ended")
            answers[rank] = json.loads(line)["ok"]
        return answers

    def _failure(self, rank: int, command: str, what: str) -> TeamFailure:
        # The rank that ended first may not be the one that failed, so every log is quoted.
        for process in self._processes:
            process.kill()
            process.wait()
        logs = "".join(
            f"\n--- rank {number} (exit {process.returncode}) ---\n"
            + self._log(number).read_text(errors="replace")[-LOG_TAIL:]
            for number, process in enumerate(self._processes)
        )
        return TeamFailure(f"{self.name}: rank {rank} {what} during {command!r}{logs}")

    def close(self) -> None:
        """Let the ranks leave by closing their stdin; end those that do not."""
        for process in self._processes:
            process.stdin.close()  # type: ignore[union-attr]
        deadline = time.monotonic() + GRACE_SECONDS
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()  # type: ignore[union-attr]
        self._logs.cleanup()

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
