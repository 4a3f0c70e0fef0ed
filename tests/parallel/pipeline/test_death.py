"""A rank that dies in the middle of a pipeline's step: the others raise, long before their time-out.

As a script this is one of the ranks, in a world of its own.
"""

from __future__ import annotations

import datetime
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import zero_ext
from zero_ext.parallel import make_mesh
from zero_ext.parallel.pipeline import LayerSpec, Pipeline, PipelineModule

RANKS, DEAD, WIDTH = 4, 1, 4


class Dying(nn.Module):
    """Ends its process at the second micro-batch of the second step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.calls = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        if self.calls == 6:
            os._exit(17)
        return hidden * self.weight


def train_until_death(rank: int, rendezvous: str) -> None:
    """Print how long after the death this rank raised an error, and the error."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=60),
    )
    mesh = make_mesh(pp=RANKS, device_type="cpu")
    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(RANKS)]
    layers[DEAD] = LayerSpec(Dying)
    module = PipelineModule(layers, mesh, loss=nn.functional.mse_loss, split="uniform")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    config = {"stage": 1, "timeout_seconds": 20}
    pipeline = Pipeline(*zero_ext.prepare(module, optimizer, config, process_group=mesh), micro_batches=4)
    values = torch.ones(8, WIDTH)
    for _ in range(4):
        began = time.monotonic()
        try:
            pipeline.train_batch(values, targets=values)
        except RuntimeError as error:
            print(f"raised after {time.monotonic() - began:.1f} s: {error}", flush=True)
            os._exit(3)
    print("never raised", flush=True)


def test_every_other_rank_raises(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(tmp_path / "rendezvous")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in range(RANKS)
    ]
    try:
        said = [process.communicate(timeout=240)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for rank, (process, text) in enumerate(zip(ranks, said, strict=True)):
        assert process.returncode == (17 if rank == DEAD else 3), text
        if rank != DEAD:
            found = re.search(
                r"raised after ([\d.]+) s: pipeline rank (\d) \(stages \[(\d)\] of 4\): it stopped", text
            )
            assert found is not None, text
            assert float(found[1]) < 20 and found[2] == found[3] == str(rank)


if __name__ == "__main__":
    train_until_death(int(sys.argv[1]), sys.argv[2])
