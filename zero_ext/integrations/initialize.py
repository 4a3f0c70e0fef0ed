"""``initialize``, which builds everything from a configuration, DeepSpeed's JSON included, and the object of
the ``engine(batch); engine.backward(loss); engine.step()`` loop that it returns."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zero_ext.checkpoint.api import load_checkpoint, save_checkpoint
from zero_ext.checkpoint.save_session import SaveHandle
from zero_ext.comm.process_group import join_world
from zero_ext.config import OptimizerConfig, ZeroConfig, load_config
from zero_ext.config.sources.config_source import ConfigSource, log_on_rank_0
from zero_ext.data import ShardedLoader
from zero_ext.integrations.prepare_with_features import prepare
from zero_ext.optim.optimizer_builder import build_optimizer, build_scheduler, check_scheduler
from zero_ext.zero.api.engine_lookup import engine_of
from zero_ext.zero.api.zero_module import ZeroModule
from zero_ext.zero.api.zero_optimizer import ZeroOptimizer
from zero_ext.zero.construction.build_units import accelerator_or_cpu

Scheduler = LRScheduler | Callable[[Optimizer], LRScheduler]


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
        return save_checkpoint(directory, self, step=step, client_state=client_state, **self._companions())

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
        loaded = load_checkpoint(directory, self, step=step, **self._companions())
        self._micro_steps = 0
        return loaded.step, loaded.client_state

    def _companions(self) -> dict[str, Any]:
        return {"scheduler": self.lr_scheduler, "loader": self.training_dataloader}


def initialize(
    *,
    model: nn.Module,
    config: ConfigSource = None,
    optimizer: Optimizer | Callable[[Iterable[Any]], Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Scheduler | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
    resolve: Mapping[str, object] | None = None,
) -> tuple[TrainingModule, Any, ShardedLoader | None, LRScheduler | None]:
    """Prepare a model for the engine loop of DeepSpeed; a collective of all ranks.

    Args:
        model: the module to train, also one that is prepared already, see [`prepare`][zero_ext.prepare]. It
            moves to the accelerator if there is one.
        config: as for [`load_config`][zero_ext.load_config].
        optimizer: over the model's parameters, or a callable that makes one from `model_parameters`.
            Without it the configuration's `optimizer` section counts, else AdamW with its defaults.
        model_parameters: what the built optimizer updates: parameters or param groups; default all that
            require gradients.
        training_data: map-style data set; the loader returned is sharded, shuffled, prefetching, and its
            position goes into checkpoints.
        lr_scheduler: a scheduler over `optimizer`, or a callable that makes one; else from the
            configuration's `scheduler` section.
        collate_fn: makes a micro-batch from samples.
        process_group: the data-parallel ranks.
        resolve: values for keys that are "auto", by key path.

    Returns:
        Engine, optimizer, loader (None without `training_data`), scheduler (None without one).

    Raises:
        ConfigError: the configuration has keys that are not supported, or wrong values.
        ValueError: optimizer, scheduler or data do not fit. Else as `prepare`.

    Examples:
        >>> config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
        >>> data = [torch.full((4,), float(index)) for index in range(8)]
        >>> engine, optimizer, loader, _ = zero_ext.initialize(
        ...     model=torch.nn.Linear(4, 1), config=config, training_data=data
        ... )
        >>> for batch in loader:
        ...     engine.backward(engine(batch).square().mean())
        ...     engine.step()
        >>> engine.global_steps
        4
    """
    settings = load_config(config, resolve)
    join_world(settings.timeout_seconds)
    # All that may be refused comes before the model is sharded.
    loader = (
        None if training_data is None else make_loader(training_data, settings, process_group, collate_fn)
    )
    made = make_optimizer(optimizer, settings, model, model_parameters)
    if lr_scheduler is None and settings.scheduler is not None:
        check_scheduler(settings.scheduler, made)
    inner, prepared = prepare(
        model, made, settings, process_group=process_group, wrap=False, device=accelerator_or_cpu()
    )
    scheduler = make_scheduler(lr_scheduler, settings, prepared)
    return TrainingModule(inner, prepared, scheduler, loader), prepared, loader, scheduler


def make_optimizer(
    optimizer: Optimizer | Callable[[Iterable[Any]], Optimizer] | None,
    settings: ZeroConfig,
    model: nn.Module,
    model_parameters: Iterable[Any] | None,
) -> Optimizer:
    """Return the optimizer to prepare: what the caller gives or makes, else the configuration's or AdamW."""
    if isinstance(optimizer, Optimizer):
        return optimizer
    if model_parameters is None:
        model_parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if optimizer is not None:
        return optimizer(model_parameters)
    if settings.optimizer is None:
        log_on_rank_0("no optimizer given and no 'optimizer' section: AdamW with torch's defaults is used")
    return build_optimizer(settings.optimizer or OptimizerConfig(type="AdamW"), model_parameters)


def make_scheduler(scheduler: Scheduler | None, settings: ZeroConfig, optimizer: Any) -> LRScheduler | None:
    """Return the scheduler over the prepared ``optimizer``: what the caller gives or makes, else the
    configuration's."""
    if isinstance(scheduler, LRScheduler):
        return scheduler
    if scheduler is not None:
        return scheduler(optimizer)
    return build_scheduler(settings.scheduler, optimizer) if settings.scheduler is not None else None


def make_loader(
    dataset: Any,
    settings: ZeroConfig,
    process_group: dist.ProcessGroup | None,
    collate_fn: Callable[[list[Any]], Any] | None,
) -> ShardedLoader:
    """Return the loader of ``dataset``, a micro-batch at a time. ``ValueError`` without a batch size."""
    rank, world_size = 0, 1
    if dist.is_initialized():
        rank, world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
    batch = settings.batch.resolve(world_size)
    if batch.micro_batch_size is None:
        raise ValueError(
            "training_data: expected a batch size in the configuration, got none. Set train_batch_size or "
            "train_micro_batch_size_per_gpu."
        )
    return ShardedLoader(
        dataset,
        batch.micro_batch_size,
        rank=rank,
        world_size=world_size,
        seed=settings.seed,
        drop_last=batch.drop_last,
        collate_fn=collate_fn,
    )
