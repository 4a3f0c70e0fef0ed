"""``initialize``: one call that builds everything from a configuration, DeepSpeed's JSON included."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zero_ext.comm.process_group import join_world
from zero_ext.config import ZeroConfig
from zero_ext.config.deepspeed import load_deepspeed_config
from zero_ext.data import ShardedLoader
from zero_ext.integrations.builders import Scheduler, make_loader, make_optimizer, make_scheduler, say
from zero_ext.integrations.engine_module import TrainingModule
from zero_ext.integrations.prepare_with_features import prepare
from zero_ext.optim.optimizer_builder import check_scheduler
from zero_ext.zero.construction.build_units import accelerator_or_cpu


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
    """Prepare a model for the engine loop of DeepSpeed; a collective of all ranks.

    Args:
        model: the module to train, also one that is prepared already, see [`prepare`][zero_ext.prepare]. It
            moves to the accelerator if there is one.
        config: DeepSpeed's JSON (mapping or path), unchanged, or a [`ZeroConfig`][zero_ext.ZeroConfig]. Keys
            that have no effect here are reported once.
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
        resolve: values for keys that DeepSpeed's JSON leaves at "auto", by key path.

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
    settings = _settings(config, resolve)
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


def _settings(
    config: ZeroConfig | Mapping[str, Any] | str | Path, resolve: Mapping[str, object] | None
) -> ZeroConfig:
    if isinstance(config, ZeroConfig):
        join_world(config.timeout_seconds)
        return config
    translation = load_deepspeed_config(config, resolve)
    join_world(translation.config.timeout_seconds)
    for note in translation.notes:
        say(str(note))
    return translation.config
