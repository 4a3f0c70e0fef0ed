"""``deepspeed.initialize``: an engine from a model and DeepSpeed's JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zero_ext.comm.process_group import join_world
from zero_ext.config import ConfigError, OptimizerConfig, ZeroConfig
from zero_ext.config.config_errors import Problem, show
from zero_ext.config.sources.config_source import ConfigSource, read_config
from zero_ext.data import ShardedLoader
from zero_ext.integrations.deepspeed import lr_schedules
from zero_ext.integrations.deepspeed.deepspeed_config import DeepSpeedConfig, check_others
from zero_ext.integrations.deepspeed.deepspeed_engine import DeepSpeedEngine
from zero_ext.integrations.deepspeed.deepspeed_reports import log_dist_once
from zero_ext.integrations.deepspeed.optimizer_types import with_parameter_offload
from zero_ext.integrations.deepspeed.zero_construction import leaf_modules_of
from zero_ext.integrations.deepspeed.zero_parameters import mark_sharded
from zero_ext.integrations.prepare_with_features import prepare
from zero_ext.optim.optimizer_builder import build_optimizer, build_scheduler, check_scheduler
from zero_ext.zero.api.engine_lookup import engine_of
from zero_ext.zero.api.zero_module import unwrapped
from zero_ext.zero.api.zero_optimizer import original_optimizer
from zero_ext.zero.construction.build_units import accelerator_or_cpu
from zero_ext.zero.units.rank_groups import data_group

if TYPE_CHECKING:
    from zero_ext.integrations.deepspeed.pipeline_module import PipelineModule

Scheduler = LRScheduler | Callable[[Optimizer], LRScheduler]

_MISSING = {
    "mpu": "there is no model parallelism besides data parallelism",
    "mesh_param": "there is no mesh of data and sequence parallelism",
}
_WITHOUT_EFFECT = ("distributed_port", "dist_init_required")
_MANAGED = "managed_gradient_accumulation"


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[[Iterable[Any]], Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Scheduler | None = None,
    *,
    config: ConfigSource | DeepSpeedConfig = None,
    config_params: ConfigSource | DeepSpeedConfig = None,
    **others: Any,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Return an engine with DeepSpeed's methods over ``model``; a collective of all ranks.

    Args:
        args: an object with a ``deepspeed_config`` that names the JSON file, if no ``config`` is given.
        model: the module to train; of a ``PipelineModule`` the engine is a ``PipelineEngine``.
        optimizer: over the model's parameters, or a callable that makes one from ``model_parameters``; else
            the JSON's ``optimizer`` section counts. With neither the engine only runs the model.
        model_parameters: parameters or param groups of the built optimizer; default all that train.
        training_data: map-style data set; a sharded, shuffling loader is made.
        lr_scheduler: a scheduler, or a callable that makes one; else the JSON's ``scheduler`` section.
        config, config_params: DeepSpeed's JSON as a mapping, a path or a ``DeepSpeedConfig``, or a native
            configuration as for ``zero_ext.load_config``.
        others: ``collate_fn`` makes a micro-batch from samples. ``distributed_port`` and
            ``dist_init_required`` change nothing; ``mpu`` and ``mesh_param`` raise.

    Returns:
        Engine, optimizer, loader, scheduler; the last three None where there is none, but for stage 3, where
        the optimizer of an engine that has none is the side of the parameters, as in DeepSpeed.

    Raises:
        ConfigError: everything wrong with the JSON, by key path.
        DeepSpeedFeatureError: an argument asks for a feature that is not served.
    """
    collate_fn = others.pop("collate_fn", None)
    check_others("deepspeed.initialize", others, _MISSING, _WITHOUT_EFFECT)
    values, settings = _loaded(_source(args, config, config_params))
    return build_engine(
        model,
        settings,
        values,
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        collate_fn=collate_fn,
    )


def build_engine(
    model: Any,
    settings: ZeroConfig,
    values: Mapping[str, Any],
    *,
    optimizer: Any,
    model_parameters: Iterable[Any] | None,
    training_data: Any,
    lr_scheduler: Scheduler | None,
    collate_fn: Callable[[list[Any]], Any] | None,
    process_group: dist.ProcessGroup | None = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Return engine, optimizer, loader and scheduler; a collective. All that may be refused is so before the
    model is sharded.

    Args:
        model: what the caller gave.
        settings: the configuration in force.
        values: the configuration as written, which the engine has as ``config``.
        optimizer: what the caller gave; without one and without the configuration's section the engine only
            runs the model.
        model_parameters, training_data, lr_scheduler, collate_fn: as for :func:`initialize`.
        process_group: the data-parallel ranks; a pipeline has its own.
    """
    _check_types(model, optimizer, lr_scheduler)
    model = unwrapped(model)
    settings = _with_leaf_modules(settings, model)
    ranks: Any = process_group
    pipeline = _as_pipeline(model)
    if pipeline is not None:
        _check_pipeline(settings, process_group)
        ranks, process_group = pipeline.mesh, data_group(pipeline.mesh)
    loader = (
        None if training_data is None else _make_loader(training_data, settings, process_group, collate_fn)
    )
    made, lr_scheduler = _chosen(settings, model, optimizer, model_parameters, lr_scheduler)
    inner, prepared = prepare(
        model, made, settings, process_group=ranks, wrap=False, device=accelerator_or_cpu()
    )
    mark_sharded(inner)
    scheduler = None if prepared is None else _make_scheduler(lr_scheduler, settings, prepared)
    engine = _engine_class(pipeline)(
        inner, with_parameter_offload(inner, prepared), scheduler, loader, dict(values)
    )
    _mark_adapters(inner)
    return engine, engine.optimizer, loader, scheduler


def _check_pipeline(settings: ZeroConfig, process_group: dist.ProcessGroup | None) -> None:
    """Raise for what a pipeline, which runs whole batches on ranks of its own, cannot do."""
    if not settings.batch.managed_gradient_accumulation:
        raise ConfigError(Problem(_MANAGED, "expected true for a pipeline, got False. Remove it."))
    if process_group is not None:
        raise ValueError("process_group: expected None for a pipeline, which has its mesh. Leave it out.")


def _chosen(
    settings: ZeroConfig,
    model: nn.Module,
    optimizer: Any,
    model_parameters: Iterable[Any] | None,
    lr_scheduler: Scheduler | None,
) -> tuple[Optimizer | None, Scheduler | None]:
    """Return the optimizer and what schedules it: those given, else those of the JSON's sections."""
    if optimizer is None and settings.optimizer is None:
        if lr_scheduler is None and settings.scheduler is None:
            return None, None
        text = (
            "there is no optimizer for it to act on. Add the section 'optimizer', pass optimizer=, or drop "
            "it."
        )
        raise ConfigError(Problem("scheduler", text))
    made = _make_optimizer(optimizer, settings.optimizer, model, model_parameters)
    if lr_scheduler is None and settings.scheduler is not None:
        check_scheduler(settings.scheduler, made)
        if settings.scheduler.type in lr_schedules.VALID_LR_SCHEDULES:
            kind = getattr(lr_schedules, settings.scheduler.type)
            lr_scheduler = partial(kind, **settings.scheduler.params)
    return made, lr_scheduler


def _make_optimizer(
    optimizer: Any, section: OptimizerConfig | None, model: nn.Module, parameters: Iterable[Any] | None
) -> Optimizer:
    """Return the optimizer to prepare: what the caller gives or makes, else that of ``section``."""
    if isinstance(optimizer, Optimizer):
        return optimizer
    if parameters is None:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if optimizer is None and section is not None:
        return build_optimizer(section, parameters, model)
    made = optimizer(parameters)
    if not isinstance(made, Optimizer):
        raise TypeError(
            "initialize: optimizer: expected a callable that returns an optimizer of torch's, got "
            f"{show(made)}. Return the optimizer."
        )
    return made


def _make_scheduler(scheduler: Scheduler | None, settings: ZeroConfig, optimizer: Any) -> LRScheduler | None:
    """Return the scheduler over the prepared ``optimizer``: what the caller gives or makes, else the
    configuration's."""
    if isinstance(scheduler, LRScheduler):
        return scheduler
    if scheduler is not None:
        made = scheduler(optimizer)
        if made is None:
            raise TypeError(
                "initialize: lr_scheduler: expected a callable that returns a scheduler, got None. Return it."
            )
        return made
    return build_scheduler(settings.scheduler, optimizer) if settings.scheduler is not None else None


def _make_loader(
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


def _mark_adapters(model: nn.Module) -> None:
    """Have a sharded model of PEFT's save its adapters, for which the base model need not be gathered."""
    peft = sys.modules.get("peft")
    if peft is None or engine_of(model).config.stage != 3 or not isinstance(model, peft.PeftModel):
        return
    from zero_ext.integrations.peft import mark_adapters

    mark_adapters(model)


def _as_pipeline(model: nn.Module) -> PipelineModule | None:
    """``model``, if it is a pipeline: where there is one, its module, which takes a second, is imported."""
    pipelines = sys.modules.get(f"{__package__}.pipeline_module")
    return model if pipelines is not None and isinstance(model, pipelines.PipelineModule) else None


def _engine_class(pipeline: PipelineModule | None) -> type[DeepSpeedEngine]:
    if pipeline is None:
        return DeepSpeedEngine
    from zero_ext.integrations.deepspeed.pipeline_engine import PipelineEngine

    return PipelineEngine


def _check_types(model: Any, optimizer: Any, lr_scheduler: Any) -> None:
    """Raise ``TypeError`` for objects of a wrong kind."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"initialize: model: expected a torch.nn.Module, got {show(model)}. Pass the module to train."
        )
    makers = "one of torch's, a callable that makes it, or None for the JSON's section"
    for name, value, kind in (
        ("optimizer", optimizer, Optimizer),
        ("lr_scheduler", lr_scheduler, LRScheduler),
    ):
        if not (value is None or isinstance(value, kind) or callable(value)):
            raise TypeError(f"initialize: {name}: expected {makers}, got {show(value)}. Pass one of these.")
    if isinstance(lr_scheduler, LRScheduler) and not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"initialize: lr_scheduler: expected one over optimizer=, got {show(lr_scheduler)} "
            "without that. Pass its optimizer as well, or a callable that makes the scheduler."
        )
    if isinstance(lr_scheduler, LRScheduler) and (
        original_optimizer(lr_scheduler.optimizer) is not original_optimizer(optimizer)
    ):
        raise ValueError(
            f"initialize: lr_scheduler: expected one over optimizer=, got {show(lr_scheduler)} over another "
            "one. Make it with that optimizer."
        )


def _source(args: Any, *values: ConfigSource | DeepSpeedConfig) -> ConfigSource:
    """Return the one configuration among ``config``, ``config_params`` (its older name) and that of
    ``args``.
    """
    sources = [source for source in values if source is not None]
    if len(sources) == 2 and sources[0] == sources[1]:
        del sources[1]
    named = getattr(args, "deepspeed_config", None)
    if named is not None:
        sources.append(named)
    if len(sources) != 1:
        found = str(len(sources)) if sources else "none"
        raise ValueError(
            f"deepspeed.initialize: expected one configuration, got {found}. Keep one of config=, "
            "config_params= and args.deepspeed_config."
        )
    source = sources[0]
    return source.values if isinstance(source, DeepSpeedConfig) else source


def _loaded(source: ConfigSource) -> tuple[Mapping[str, Any], ZeroConfig]:
    """Return the configuration as written and what it means here."""
    written = read_config(source).of_deepspeed_unless_native()
    config, notes = written.resolved()
    join_world(config.timeout_seconds)
    for note in notes:
        log_dist_once(str(note), ranks=[0])
    return written.values, config


def _with_leaf_modules(settings: ZeroConfig, model: nn.Module) -> ZeroConfig:
    """Return the settings with the modules that ``set_z3_leaf_modules`` marked."""
    names = leaf_modules_of(model)
    if not names or settings.stage != 3:
        return settings
    if "" in names:
        raise ConfigError(
            Problem(
                "zero_optimization.leaf_module", "the whole model cannot be a leaf. Name modules inside it."
            )
        )
    listed = dict.fromkeys((*settings.units.leaf_modules, *names))
    return settings.replace(units=settings.units.replace(leaf_modules=tuple(listed)))
