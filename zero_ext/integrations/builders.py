"""Objects that ``initialize`` makes from a configuration: optimizer, scheduler, loader."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zero_ext.config import OptimizerConfig, ZeroConfig
from zero_ext.data import ShardedLoader
from zero_ext.optim.optimizer_builder import build_optimizer, build_scheduler

logger = logging.getLogger("zero_ext")

Scheduler = LRScheduler | Callable[[Optimizer], LRScheduler]


def say(message: str) -> None:
    """Write a warning to rank 0's log."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning("%s", message)


def make_optimizer(
    optimizer: Optimizer | Callable[[Iterable[Any]], Optimizer] | None,
    settings: ZeroConfig,
    model: nn.Module,
    model_parameters: Iterable[Any] | None,
) -> Optimizer:
    """Return the optimizer to prepare: what the caller gives or makes, else the configuration's, else
    AdamW.
    """
    if isinstance(optimizer, Optimizer):
        return optimizer
    if model_parameters is None:
        model_parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if optimizer is not None:
        return optimizer(model_parameters)
    if settings.optimizer is None:
        say("no optimizer given and no 'optimizer' section: AdamW with torch's defaults is used")
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
