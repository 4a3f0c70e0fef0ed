"""Accelerate's loop with ``ZeroAccelerator``."""

import torch

from benchmarks.harness.shapes import Shape, build_model
from benchmarks.peers.base import adamw, loss_of
from benchmarks.peers.zero_ext_engine import configuration, norm_of
from zero_ext.integrations.accelerate import ZeroAccelerator


class AccelerateTrainer:
    """The loop of Accelerate's examples; model, optimizer and configuration are those of zero_ext's own."""

    def __init__(self, shape: Shape, stage: int) -> None:
        model = build_model(shape)
        self._accelerator = ZeroAccelerator(cpu=True, config=configuration(stage, 0, False, "fp32", {}))
        optimizer = adamw(list(model.parameters()))
        self._schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        self._model, self._optimizer, self._schedule = self._accelerator.prepare(
            model, optimizer, self._schedule
        )

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        with self._accelerator.accumulate(self._model):
            loss = loss_of(self._model, tokens)
            self._accelerator.backward(loss)
            self._optimizer.step()
            self._schedule.step()
            self._optimizer.zero_grad()
        return loss.detach()

    def gradient_norm(self) -> float:
        return norm_of(self._model)
