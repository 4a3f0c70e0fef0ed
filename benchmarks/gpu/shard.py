"""A flat shard of random values with Adam's state, as the fused ops take it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.peers.base import BETAS, EPSILON, LEARNING_RATE, WEIGHT_DECAY
from zero_ext import ops


@dataclass
class Shard:
    """Master weights, moments, and the arguments that one update of all of them takes."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    segments: Tensor
    hyper: Tensor
    scale: Tensor

    def update(self, grad: Tensor, param: Tensor | None = None) -> None:
        """One pass of AdamW."""
        state = (self.master, self.exp_avg, self.exp_avg_sq)
        ops.adam_step_(*state, grad, param, self.segments, self.hyper, self.scale)


def shard_of(count: int, device: torch.device, moments: torch.dtype = torch.float32) -> Shard:
    """`count` elements on `device`, at step 3 of the shared hyper-parameters."""
    row = [LEARNING_RATE, *BETAS, EPSILON, WEIGHT_DECAY, 3.0, 1.0, 0.0]
    return Shard(
        torch.randn(count, device=device),
        (1e-3 * torch.randn(count, device=device)).to(moments),
        (1e-6 * torch.rand(count, device=device)).to(moments),
        torch.tensor([[0, count]], dtype=torch.int64, device=device),
        torch.tensor([row], dtype=torch.float64, device=device),
        torch.ones((), device=device),
    )


def has_kernel(op: str, device: torch.device) -> bool:
    """Whether `op` has a kernel of its own for `device`."""
    key = {"cuda": "CUDA", "cpu": "CPU"}[device.type]
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"zero_ext::{op}", key))
