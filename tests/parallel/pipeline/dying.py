"""A rank of a pipeline of its own world, of which one dies in the middle of a step; run as a script."""

from __future__ import annotations

import datetime
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import zero_ext
from zero_ext.parallel import make_mesh
from zero_ext.parallel.pipeline import LayerSpec, Pipeline, PipelineModule

WIDTH = 4


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


def main(rank: int, ranks: int, rendezvous: str) -> None:
    """Trains until the death; prints how long after it this rank learnt of it, and what it was told."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=60),
    )
    mesh = make_mesh(pp=ranks, device_type="cpu")
    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(ranks)]
    layers[1] = LayerSpec(Dying)
    module = PipelineModule(layers, mesh, loss=nn.functional.mse_loss, split="uniform")
    config = {"stage": 1, "timeout_seconds": 20}
    model, optimizer = zero_ext.prepare(
        module, torch.optim.SGD(module.parameters(), lr=0.1), config, process_group=mesh
    )
    pipeline = Pipeline(model, optimizer, micro_batches=4)
    values = torch.ones(8, WIDTH)
    for _ in range(4):
        began = time.monotonic()
        try:
            pipeline.train_batch(values, targets=values)
        except RuntimeError as error:
            print(f"raised after {time.monotonic() - began:.1f} s: {error}", flush=True)
            os._exit(3)
    print("never raised", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
