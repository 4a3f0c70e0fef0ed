"""``initialize``: one call that builds everything from a configuration, DeepSpeed's JSON included."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zero_ext.config import OptimizerPolicy, ZeroConfig
from zero_ext.config.deepspeed import load_deepspeed_config
from zero_ext.data import ShardedLoader
from zero_ext.integrations.step_log import StepLog
from zero_ext.integrations.training_module import TrainingModule
from zero_ext.optim.build import build_optimizer, build_scheduler, check_scheduler
from zero_ext.zero.construction import accelerator_or_cpu
from zero_ext.zero.lookup import engine_of
from zero_ext.zero.prepare import prepare
from zero_ext.zero.process_group import join_world

logger = logging.getLogger("zero_ext")

Scheduler = LRScheduler | Callable[[Optimizer], LRScheduler]


def initialize(
    *,
    model: nn.Module,
    config: ZeroConfig | Mapping[str, Any] | str | Path,
    optimizer: Optimizer | Callable[[Iterable[Any]], Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Scheduler | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
    resolve: Mapping[str, object] | None = None,
) -> tuple[TrainingModule, Any, ShardedLoader | None, LRScheduler | None]:
    """Prepares a model for the engine loop; a collective of all ranks.

    Args:
        model: the module to train; it moves to the accelerator if there is one.
        config: DeepSpeed's JSON (mapping or path), unchanged, or a :class:`ZeroConfig`. Keys that have no
            effect here are reported once; keys that cannot be served raise :class:`ConfigError`.
        optimizer: over the model's parameters, or a callable that makes one from ``model_parameters``.
            Without it the configuration's ``optimizer`` section counts, else AdamW with its defaults.
        model_parameters: what the built optimizer updates: parameters or param groups; default all that
            require gradients.
        training_data: map-style data set; the loader returned is sharded, shuffled, prefetching, and its
            position goes into checkpoints.
        lr_scheduler: a scheduler over ``optimizer``, or a callable that makes one; else from the
            configuration's ``scheduler`` section.
        collate_fn: makes a micro-batch from samples.
        process_group: the data-parallel ranks.
        resolve: values for keys that DeepSpeed's JSON leaves at "auto", by key path.

    Returns:
        Engine, optimizer, loader (None without ``training_data``), scheduler (None without one).
    """
    settings = _settings(config, resolve)
    # All that may be refused comes before the model is sharded.
    loader = None if training_data is None else _loader(training_data, settings, process_group, collate_fn)
    made = _optimizer(optimizer, settings, model, model_parameters)
    if lr_scheduler is None and settings.scheduler is not None:
        check_scheduler(settings.scheduler, made)
    inner, prepared = prepare(
        model, made, settings, process_group=process_group, wrap=False, device=accelerator_or_cpu()
    )
    scheduler = _scheduler(lr_scheduler, settings, prepared)
    if settings.steps_per_print is not None and engine_of(inner).rank == 0:
        engine_of(inner).subscribe(StepLog(settings.steps_per_print))
    return TrainingModule(inner, prepared, scheduler, loader), prepared, loader, scheduler


def _settings(
    config: ZeroConfig | Mapping[str, Any] | str | Path, resolve: Mapping[str, object] | None
) -> ZeroConfig:
    if isinstance(config, ZeroConfig):
        join_world(config.timeout_seconds)
        return config
    translation = load_deepspeed_config(config, resolve)
    join_world(translation.config.timeout_seconds)
    for note in translation.notes:
        _say(str(note))
    return translation.config


def _say(message: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning("%s", message)


def _optimizer(
    optimizer: Optimizer | Callable[[Iterable[Any]], Optimizer] | None,
    settings: ZeroConfig,
    model: nn.Module,
    model_parameters: Iterable[Any] | None,
) -> Optimizer:
    if isinstance(optimizer, Optimizer):
        return optimizer
    if model_parameters is None:
        model_parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if optimizer is not None:
        return optimizer(model_parameters)
    if settings.optimizer is None:
        _say("no optimizer given and no 'optimizer' section: AdamW with torch's defaults is used")
    return build_optimizer(settings.optimizer or OptimizerPolicy(type="AdamW"), model_parameters)


def _scheduler(given: Scheduler | None, settings: ZeroConfig, optimizer: Any) -> LRScheduler | None:
    if isinstance(given, LRScheduler):
        return given
    if given is not None:
        return given(optimizer)
    return build_scheduler(settings.scheduler, optimizer) if settings.scheduler is not None else None


def _loader(
    dataset: Any,
    settings: ZeroConfig,
    process_group: dist.ProcessGroup | None,
    collate_fn: Callable[[list[Any]], Any] | None,
) -> ShardedLoader:
    rank, world_size = 0, 1
    if dist.is_initialized():
        rank, world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
    batch = settings.batch.resolve(world_size)
    if batch.micro_batch_size is None:
        raise ValueError(
            "training_data needs a batch size: set train_batch_size or train_micro_batch_size_per_gpu in the "
            "configuration"
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
