"""A rank of pipelines, split tensors, sequences and experts; driven by a team."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.harness.parallel_trainers import (
    Shape,
    TorchPipeline,
    TorchTensors,
    Trainer,
    ZeroPipeline,
    ZeroTensors,
)
from benchmarks.harness.token_trainers import TorchTokens, ZeroTokens
from benchmarks.harness.worker import main
from zero_ext.parallel import make_mesh
from zero_ext.zero import engine_of

COMMANDS = ("start", "make", "steps", "slots", "stage_seconds", "exchange_seconds", "traffic")
TORCH: dict[str, Callable[[Shape, DeviceMesh], Trainer]] = {
    "pp": TorchPipeline,
    "tp": TorchTensors,
    "cp": partial(TorchTokens, axis="cp"),
    "ep": partial(TorchTokens, axis="ep"),
}
ZERO: dict[str, Callable[..., Trainer]] = {
    "pp": ZeroPipeline,
    "tp": ZeroTensors,
    "cp": partial(ZeroTokens, axis="cp"),
    "ep": partial(ZeroTokens, axis="ep"),
}


def shape_of(kind: str, shape: Shape) -> Shape:
    """That of a contender: sequences over ranks are long ones."""
    return shape.one_window() if "-cp" in kind else shape


def trainer(kind: str, shape: Shape, ranks: int) -> Trainer:
    """The contender called `kind`, on so many ranks: torch's along an axis of the mesh, "torch-cp", or
    zero_ext's with the stage behind it, "zero-pp-2"."""
    who, axis, *stage = kind.split("-")
    shape, mesh = shape_of(kind, shape), make_mesh({axis: ranks})
    return TORCH[axis](shape, mesh) if who == "torch" else ZERO[axis](shape, mesh, stage=int(stage[0]))


class ParallelRank:
    """State of this process: the contenders that it has made."""

    def start(self, shape: dict[str, int]) -> None:
        """Joins the others."""
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.shape, self.made, self.steps_done = Shape(**shape), dict[str, Trainer](), dict[str, int]()

    def make(self, kind: str) -> None:
        """Constructs a contender, over all ranks."""
        self.made[kind], self.steps_done[kind] = trainer(kind, self.shape, self.ranks), 0

    def steps(self, kind: str, count: int) -> float:
        """Seconds of so many steps, between two barriers."""
        shape = shape_of(kind, self.shape)
        batches = [shape.batch(self.steps_done[kind] + number) for number in range(count)]
        self.steps_done[kind] += count
        dist.barrier()
        began = time.perf_counter()
        for inputs, targets in batches:
            self.made[kind].step(inputs, targets)
        dist.barrier()
        return time.perf_counter() - began

    def slots(self, kind: str) -> list[dict[str, Any]]:
        """What this rank computed when in the last step of one of zero_ext's pipelines."""
        return [asdict(slot) for slot in self._pipeline(kind).pipeline.slots]

    def stage_seconds(self, kind: str) -> dict[str, list[float]]:
        """Seconds of forward and backward of this rank's stage for every micro-batch of a step, the other
        ranks asleep. The stages take turns, so that a machine that gets slower does so for all of them."""
        made, inputs = self._pipeline(kind), self._stage_inputs()
        found: dict[str, list[float]] = {"forward": [], "backward": []}
        for turn in range(self.ranks * self.shape.micro_batches):
            if turn % self.ranks == self.rank:
                began = time.perf_counter()
                output = made.model(0, inputs)
                middle = time.perf_counter()
                with engine_of(made.model).collector.scaled_pass(reduces=False):
                    output.sum().backward()
                found["forward"].append(middle - began)
                found["backward"].append(time.perf_counter() - middle)
            dist.barrier()
        return found

    def exchange_seconds(self, repeats: int) -> float:
        """Median seconds in which the activations of a micro-batch come from rank 0 to rank 1."""
        shape, durations = self.shape, []
        hidden = torch.zeros(shape.samples, shape.window, shape.width)
        for _ in range(repeats):
            dist.barrier()
            began = time.perf_counter()
            if self.rank < 2:
                for sender in (0, 1):
                    other = 1 - self.rank
                    dist.send(hidden, other) if self.rank == sender else dist.recv(hidden, other)
            durations.append((time.perf_counter() - began) / 2)
        return statistics.median(durations)

    def traffic(self, stage: int, grad_reduction: str) -> dict[str, int]:
        """Bytes by kind that this rank's engine sends in a step of 2 stages over the rest as replicas."""
        own = ZeroPipeline(self.shape, make_mesh(pp=2), stage, grad_reduction)
        own.step(*self.shape.batch(0))
        own.step(*self.shape.batch(1))
        return dict(engine_of(own.model).traffic.last_bytes_sent)

    def _pipeline(self, kind: str) -> ZeroPipeline:
        made = self.made[kind]
        if not isinstance(made, ZeroPipeline):
            raise ValueError(f"{kind} is no pipeline of zero_ext")
        return made

    def _stage_inputs(self) -> torch.Tensor:
        """A micro-batch as this rank's stage gets it."""
        shape = self.shape
        if self.rank == 0:
            return shape.batch(0)[0][: shape.samples]
        return torch.randn(shape.samples, shape.window, shape.width, requires_grad=True)


if __name__ == "__main__":
    main(ParallelRank(), COMMANDS)
