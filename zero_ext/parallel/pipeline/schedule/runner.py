"""The base class that runs a pipeline's batches on a rank: forward and backward, or forward only."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn

from zero_ext.parallel.pipeline.schedule.pipeline_timeline import Slot
from zero_ext.parallel.pipeline.stages.stage_module import StageModule
from zero_ext.zero.engine import Engine


class PipelineRunner(ABC):
    """Runs ``module``, which ``engine`` moves and ``prepared`` is called for, on batches of
    ``micro_batches``. ``slots`` are what it computed in the last step."""

    def __init__(self, module: StageModule, prepared: nn.Module, engine: Engine, micro_batches: int) -> None:
        self.slots: list[Slot] = []
        self._module, self._prepared, self._engine = module, prepared, engine
        self._micro_batches = micro_batches

    @abstractmethod
    def train(
        self, inputs: tuple[torch.Tensor, ...], targets: torch.Tensor | None, shape: int
    ) -> list[torch.Tensor]:
        """Run forward and backward of a batch of the shapes ``shape``; each micro-batch's share of the
        mean loss, scaled as its gradients are, on the rank with the last stage."""

    @abstractmethod
    def evaluate(self, inputs: tuple[torch.Tensor, ...], targets: torch.Tensor | None) -> list[torch.Tensor]:
        """Return the same without gradients, unscaled."""

    @abstractmethod
    def drop(self) -> None:
        """Release what a failed batch has left."""

    def _split(self, inputs: tuple[torch.Tensor, ...]) -> list[tuple[torch.Tensor, ...]]:
        return list(zip(*(each.chunk(self._micro_batches) for each in inputs), strict=True))

    def _scaled_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return a micro-batch's share of the batch's mean loss, scaled where gradients are fp16."""
        if torch.is_grad_enabled():
            loss = self._engine.scale_loss(loss)
        return loss / self._micro_batches
