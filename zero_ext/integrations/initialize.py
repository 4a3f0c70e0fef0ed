"""``zero_ext.initialize``: the engine of DeepSpeed's loop from a configuration in any format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zero_ext.comm.process_group import join_world
from zero_ext.config import OptimizerConfig
from zero_ext.config.sources.config_source import ConfigSource, log_notes, log_on_rank_0, read_config
from zero_ext.data import ShardedLoader

if TYPE_CHECKING:
    from zero_ext.integrations.deepspeed.deepspeed_engine import DeepSpeedEngine
    from zero_ext.integrations.deepspeed.deepspeed_initialize import Scheduler


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
) -> tuple[DeepSpeedEngine, Any, ShardedLoader | None, LRScheduler | None]:
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
        Engine, optimizer, loader (None without `training_data`), scheduler (None without one). The engine is
        that of `deepspeed.initialize`. `engine.zero_config` is the configuration in force.

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
        ...     loss = engine.backward(engine(batch).square().mean())
        ...     engine.step()
        >>> engine.global_steps
        4
    """
    # All of DeepSpeed's names come along, which takes a second.
    from zero_ext.integrations.deepspeed.deepspeed_initialize import build_engine

    written = read_config(config)
    settings, notes = written.resolved(resolve)
    log_notes(notes)
    join_world(settings.timeout_seconds)
    if optimizer is None and settings.optimizer is None:
        log_on_rank_0("no optimizer given and no 'optimizer' section: AdamW with torch's defaults is used")
        settings = settings.replace(optimizer=OptimizerConfig(type="AdamW"))
    return build_engine(
        model,
        settings,
        written.values,
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        collate_fn=collate_fn,
        process_group=process_group,
    )
