"""The plain loop: one process, bfloat16 parameters, float32 masters; and its forward and backward alone."""

from typing import Any

import torch

from benchmarks.harness.shapes import Shape, build_model
from benchmarks.peers.base import backward_of, loss_of
from benchmarks.peers.masters import FrugalMasterWeightAdamW, MasterWeightAdamW


class PlainTrainer:
    """A model and a master-weight AdamW, no distribution."""

    def __init__(self, shape: Shape) -> None:
        self.model = build_model(shape)
        self.optimizer = MasterWeightAdamW(list(self.model.parameters()))

    def step(self, *micro_batches: torch.Tensor) -> torch.Tensor:
        loss = backward_of(self.model, micro_batches)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def gradient_norm(self) -> float:
        return self.optimizer.norm.item()


class ComputeTrainer:
    """Forward and backward of the plain model, and nothing else of a step: no optimizer, no communication.

    The gradients stay until the next step, so that their norm can be read.
    """

    def __init__(self, shape: Shape) -> None:
        self.model = build_model(shape)

    def step(self, *micro_batches: torch.Tensor) -> torch.Tensor:
        self.model.zero_grad()
        return backward_of(self.model, micro_batches)

    def gradient_norm(self) -> float:
        """Norm of this rank's own gradient."""
        gradients = [each.grad for each in self.model.parameters() if each.grad is not None]
        return torch.nn.utils.get_total_norm(gradients).item()


class FrugalTrainer:
    """The plain loop with as little memory as PyTorch alone needs for it; blocks are computed again in
    backward if ``checkpointed``."""

    def __init__(self, shape: Shape, checkpointed: bool = False) -> None:
        model: Any = build_model(shape)  # transformers' models have methods that a Module does not
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model: torch.nn.Module = model
        self.optimizer = FrugalMasterWeightAdamW(list(self.model.parameters()))

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        loss = loss_of(self.model, tokens)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def gradient_norm(self) -> float:
        raise NotImplementedError("the gradients are gone after a step")
