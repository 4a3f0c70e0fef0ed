"""One rank of a contender: waits for commands on stdin, answers each with one line of JSON.

Between commands the process sleeps in a read, so ranks that wait their turn use no processor time. Everything
the libraries print goes to stderr, which the team keeps in a log file.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from benchmarks.harness import process_memory
from benchmarks.harness.allocations import AllocationCounter
from benchmarks.harness.shapes import SEQUENCE_LENGTH, batch_for, build_model, shape_named
from benchmarks.peers import Trainer, trainer_class
from benchmarks.peers.base import loss_of

# Peers that need a process group for one rank, too. The others run without one, or make their own.
GROUP_FAMILIES = ("ddp", "fsdp2")


class Rank:
    """State of this process: its trainer, and how many steps it has made."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.trainer: Trainer | None = None
        self.steps_done = 0

    def start(self, family: str, options: dict, shape: str, threads: int) -> dict[str, Any]:
        """Join the others and construct the trainer; bytes before, at the highest point, and after.

        A throw-away model trains one step first, so that lazily loaded library code counts as "before".
        """
        torch.set_num_threads(threads)
        self.shape = shape_named(shape)
        construct = trainer_class(family)
        throw_away = build_model(shape_named("tiny"))
        loss_of(throw_away, batch_for(shape_named("tiny"), self.rank, 0)).backward()
        del throw_away
        if "WORLD_SIZE" in os.environ:
            dist.init_process_group("gloo")
            dist.all_reduce(torch.zeros(1))
        elif family in GROUP_FAMILIES:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        process_memory.return_free_pages()
        before = process_memory.resident_bytes()
        process_memory.reset_peak()
        began = time.perf_counter()
        self.trainer = construct(self.shape, **options)
        return {
            "seconds": time.perf_counter() - began,
            "before": before,
            "peak": process_memory.peak_bytes(),
            "resident": process_memory.resident_bytes(),
        }

    def steps(
        self, unmeasured: int, measured: int, length: int = SEQUENCE_LENGTH, accumulation: int = 1
    ) -> dict[str, Any]:
        """Train on sequences of `length` tokens, `accumulation` micro-batches per step; seconds are those of
        the measured steps alone, between two barriers."""
        losses = [self._step(length, accumulation) for _ in range(unmeasured)]
        self._barrier()
        cpu, began = time.process_time(), time.perf_counter()
        losses += [self._step(length, accumulation) for _ in range(measured)]
        self._barrier()
        return {
            "seconds": time.perf_counter() - began,
            "cpu_seconds": time.process_time() - cpu,
            "losses": [loss.item() for loss in losses],
        }

    def _step(self, length: int, accumulation: int = 1) -> torch.Tensor:
        first = self.steps_done * accumulation
        numbers = range(first, first + accumulation)
        self.steps_done += 1
        return self._trainer().step(*(batch_for(self.shape, self.rank, each, length) for each in numbers))

    def gradient_norm(self) -> float:
        """Global norm of the last step's gradient, before clipping."""
        return self._trainer().gradient_norm()

    def processor_seconds(self) -> float:
        """User and system time this process has used."""
        return time.process_time()

    def memory(self) -> dict[str, int]:
        """Resident bytes now and the high-water mark."""
        return {"resident": process_memory.resident_bytes(), "peak": process_memory.peak_bytes()}

    def reset_peak(self) -> None:
        """Start the high-water mark again."""
        process_memory.reset_peak()

    def steady(self, steps: int) -> dict[str, Any]:
        """Train `steps` steps; minor page faults, growth of the resident set in bytes, bytes gathered, and
        the allocations that the contender's own code made, by place."""
        import zero_ext

        trainer = self._trainer()
        counter = AllocationCounter(Path(zero_ext.__file__).parent, ["zero/tiling"])
        self._barrier()
        began, resident = time.perf_counter(), process_memory.resident_bytes()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        with counter:
            for _ in range(steps):
                self._step(SEQUENCE_LENGTH)
        return {
            "faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults,
            "growth": process_memory.resident_bytes() - resident,
            "gathered": steps * trainer.gathered_bytes(),  # type: ignore[attr-defined]
            "allocations": dict(counter.found),
            "seconds": time.perf_counter() - began,
        }

    def staging(self) -> dict[str, int]:
        """Bytes of memory that state passes through, by tier, as the contender holds them now."""
        return self._trainer().staging_bytes()  # type: ignore[attr-defined]

    def account(self) -> dict[str, Any]:
        """The contender's own ledger beside two outside views: live tensors, and resident bytes trimmed."""
        trainer = self._trainer()
        process_memory.return_free_pages()
        resident = process_memory.resident_bytes()  # first: the walk over live tensors allocates by itself
        return {
            "breakdown": trainer.memory_breakdown(),  # type: ignore[attr-defined]
            "live_tensors": process_memory.live_tensor_bytes(),
            "resident": resident,
        }

    def close(self) -> None:
        """Let go of what a contender keeps outside memory."""
        if self.trainer is not None and hasattr(self.trainer, "close"):
            self.trainer.close()

    def _trainer(self) -> Trainer:
        if self.trainer is None:
            raise RuntimeError("this rank has no trainer yet: send 'start' first")
        return self.trainer

    @staticmethod
    def _barrier() -> None:
        if dist.is_initialized():
            dist.barrier()


COMMANDS = (
    "start",
    "steps",
    "gradient_norm",
    "processor_seconds",
    "memory",
    "reset_peak",
    "staging",
    "steady",
    "account",
)


def serve(rank: Any, commands: Sequence[str], requests: TextIO, replies: TextIO) -> None:
    """Answer commands until stdin closes: {"do": name, ...arguments} in, {"ok": value} out."""
    for line in requests:
        arguments = json.loads(line)
        name = arguments.pop("do")
        if name not in commands:
            raise ValueError(f"unknown command {name!r}; known: {', '.join(commands)}")
        json.dump({"ok": getattr(rank, name)(**arguments)}, replies)
        replies.write("\n")
        replies.flush()


def main(rank: Any, commands: Sequence[str]) -> None:
    """Keep stdout for replies, send every other print to stderr, serve."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(rank, commands, sys.stdin, replies)
    if hasattr(rank, "close"):
        rank.close()
    replies.close()
    sys.stderr.flush()
    # Peers' destructors may wait for ranks that are gone already, so the interpreter's own end is left out.
    os._exit(0)


if __name__ == "__main__":
    main(Rank(), COMMANDS)
