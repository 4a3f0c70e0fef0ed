"""The object of the ``engine(batch); engine.backward(loss); engine.step()`` loop."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from zero_ext.checkpoint.api import load_checkpoint, save_checkpoint
from zero_ext.checkpoint.save_session import SaveHandle
from zero_ext.config import ZeroConfig
from zero_ext.data import ShardedLoader
from zero_ext.zero.api.engine_lookup import engine_of
from zero_ext.zero.api.zero_module import ZeroModule
from zero_ext.zero.api.zero_optimizer import ZeroOptimizer


class TrainingModule(ZeroModule):
    """A prepared model that knows its optimizer, scheduler and loader, and counts micro-batches.

    :meth:`backward` divides the loss by the configured accumulation steps; :meth:`step` acts only on the
    last micro-batch of a step, then also steps the scheduler and clears the gradients.
    """

    optimizer: ZeroOptimizer
    lr_scheduler: LRScheduler | None
    training_dataloader: ShardedLoader | None
    _micro_steps: int

    def __init__(
        self,
        module: nn.Module,
        optimizer: ZeroOptimizer,
        scheduler: LRScheduler | None,
        loader: ShardedLoader | None,
    ) -> None:
        super().__init__(module)
        # Its own attributes from here on; others that are set on a wrapper go to the wrapped module.
        vars(self).update(
            optimizer=optimizer, lr_scheduler=scheduler, training_dataloader=loader, _micro_steps=0
        )

    @property
    def config(self) -> ZeroConfig:
        """The configuration in force, batch sizes resolved."""
        return engine_of(self).config

    @property
    def global_steps(self) -> int:
        """Optimizer steps so far, skipped ones included."""
        return engine_of(self).steps

    @property
    def skipped_steps(self) -> int:
        """Steps skipped because fp16 gradients overflowed."""
        return engine_of(self).skipped_steps

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.module.parameters()).device

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of one optimizer step."""
        return self.config.batch.gradient_accumulation_steps

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch under way is the last one of its step."""
        return (self._micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Backward of the loss, divided by the accumulation steps and scaled for fp16."""
        super().backward(loss / self.gradient_accumulation_steps(), **kwargs)

    def step(self) -> None:
        """Ends a micro-batch; on the last of a step: optimizer, scheduler (unless skipped), zero_grad."""
        last = self.is_gradient_accumulation_boundary()
        self._micro_steps += 1
        if not last:
            return
        skipped = self.skipped_steps
        self.optimizer.step()
        if self.lr_scheduler is not None and self.skipped_steps == skipped:
            self.lr_scheduler.step()
        self.optimizer.zero_grad()

    def get_lr(self) -> list[float]:
        """The learning rate of every param group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """The gradient norm of the last step before clipping; None if nothing asked for it."""
        return engine_of(self).grad_norm

    def save_checkpoint(
        self, directory: str | os.PathLike[str], *, step: int | None = None, client_state: Any = None
    ) -> SaveHandle:
        """:func:`zero_ext.save_checkpoint` with scheduler and loader; the step counts as is."""
        return save_checkpoint(
            directory,
            self,
            step=step,
            scheduler=self.lr_scheduler,
            loader=self.training_dataloader,
            client_state=client_state,
        )

    def load_checkpoint(
        self, directory: str | os.PathLike[str], *, step: int | None = None
    ) -> tuple[int, Any]:
        """:func:`zero_ext.load_checkpoint` with scheduler and loader; returns step and client state."""
        loaded = load_checkpoint(
            directory,
            self,
            step=step,
            scheduler=self.lr_scheduler,
            loader=self.training_dataloader,
        )
        self._micro_steps = 0
        return loaded.step, loaded.client_state
