"""torch's DistributedDataParallel over bfloat16 parameters, with float32 masters on every rank."""

import torch
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.shapes import Shape, build_model
from benchmarks.peers.base import loss_of
from benchmarks.peers.masters import MasterWeightAdamW


class DDPTrainer:
    """Gradients live in DDP's buckets (`gradient_as_bucket_view`), its fastest and leanest setting."""

    def __init__(self, shape: Shape) -> None:
        self.model = DistributedDataParallel(build_model(shape), gradient_as_bucket_view=True)
        self.optimizer = MasterWeightAdamW(list(self.model.parameters()))

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        loss = loss_of(self.model, tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def gradient_norm(self) -> float:
        return self.optimizer.norm.item()
