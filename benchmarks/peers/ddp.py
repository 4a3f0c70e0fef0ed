"""torch's DistributedDataParallel over bfloat16 parameters, with float32 masters on every rank."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.shapes import Shape, build_model
from benchmarks.peers.base import backward_of
from benchmarks.peers.masters import MasterWeightAdamW


class DDPTrainer:
    """Gradients live in DDP's buckets (`gradient_as_bucket_view`), if ``settings`` do not differ.

    ``settings`` are further arguments of DistributedDataParallel.
    """

    def __init__(self, shape: Shape, settings: Mapping[str, Any] | None = None) -> None:
        arguments = {"gradient_as_bucket_view": True, **(settings or {})}
        self.model = DistributedDataParallel(build_model(shape), **arguments)
        self.optimizer = MasterWeightAdamW(list(self.model.parameters()))

    def step(self, *micro_batches: torch.Tensor) -> torch.Tensor:
        loss = backward_of(self.model, micro_batches, self.model.no_sync)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def gradient_norm(self) -> float:
        return self.optimizer.norm.item()
