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
    """A prepared model that has its optimizer, scheduler and loader, and counts micro-batches.

    [`initialize`][zero_ext.initialize] makes it. `backward` divides the loss by the configured accumulation
    steps. `step` acts only on the last micro-batch of a step, then also steps the scheduler and clears the
    gradients.

    Args:
        module: the prepared module.
        optimizer: the prepared optimizer.
        scheduler: steps after each optimizer step that is not skipped.
        loader: its position goes into checkpoints.

    Attributes:
        optimizer: as given.
        lr_scheduler: `scheduler` as given.
        training_dataloader: `loader` as given.
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
        """The device of the parameters."""
        return next(self.module.parameters()).device

    def gradient_accumulation_steps(self) -> int:
        """Return the number of micro-batches per optimizer step.

        Returns:
            The number.
        """
        return self.config.batch.gradient_accumulation_steps

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the current micro-batch is the last one of its step.

        Returns:
            True on the last one.
        """
        return (self._micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run backward of the loss, divided by the accumulation steps and scaled for fp16.

        Args:
            loss: 0-d, as computed.
            **kwargs: passed on to `loss.backward`.
        """
        super().backward(loss / self.gradient_accumulation_steps(), **kwargs)

    def step(self) -> None:
        """End a micro-batch, and on the last one of a step run the optimizer, the scheduler and `zero_grad`.

        The scheduler waits if the optimizer step was skipped.
        """
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
        """Return the learning rates.

        Returns:
            One per param group.
        """
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """Return the gradient norm of the last step before clipping.

        Returns:
            The norm; None if nothing asked for it.
        """
        return engine_of(self).grad_norm

    def save_checkpoint(
        self, directory: str | os.PathLike[str], *, step: int | None = None, client_state: Any = None
    ) -> SaveHandle:
        """Save a checkpoint with scheduler and loader.

        As [`zero_ext.save_checkpoint`][zero_ext.save_checkpoint].

        Args:
            directory: holds the checkpoints.
            step: number of the checkpoint; default the optimizer steps so far.
            client_state: the user's own state.

        Returns:
            The save.
        """
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
        """Load a checkpoint with scheduler and loader.

        As [`zero_ext.load_checkpoint`][zero_ext.load_checkpoint].

        Args:
            directory: holds the checkpoints.
            step: number of the checkpoint; default the latest.

        Returns:
            The step and the client state.
        """
        loaded = load_checkpoint(
            directory,
            self,
            step=step,
            scheduler=self.lr_scheduler,
            loader=self.training_dataloader,
        )
        self._micro_steps = 0
        return loaded.step, loaded.client_state
