"""``deepspeed.initialize``: an engine from a model and DeepSpeed's JSON."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zero_ext.comm.process_group import join_world
from zero_ext.config import ConfigError, ZeroConfig
from zero_ext.config.config_errors import Problem, show
from zero_ext.config.sources.config_source import read_config
from zero_ext.integrations.deepspeed import lr_schedules
from zero_ext.integrations.deepspeed.deepspeed_config import check_others, json_values
from zero_ext.integrations.deepspeed.deepspeed_engine import DeepSpeedEngine
from zero_ext.integrations.deepspeed.deepspeed_reports import log_dist_once
from zero_ext.integrations.deepspeed.optimizer_types import with_parameter_offload
from zero_ext.integrations.deepspeed.zero_construction import leaf_modules_of
from zero_ext.integrations.deepspeed.zero_parameters import mark_sharded
from zero_ext.integrations.initialize import Scheduler, make_loader, make_optimizer, make_scheduler
from zero_ext.integrations.prepare_with_features import prepare
from zero_ext.optim.optimizer_builder import check_scheduler
from zero_ext.zero.api.engine_lookup import engine_of
from zero_ext.zero.api.zero_module import unwrapped
from zero_ext.zero.construction.build_units import accelerator_or_cpu
from zero_ext.zero.units.rank_groups import data_group

if TYPE_CHECKING:
    from zero_ext.integrations.deepspeed.pipeline_module import PipelineModule

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
    config: Mapping[str, Any] | str | Path | None = None,
    config_params: Mapping[str, Any] | str | Path | None = None,
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
        config, config_params: DeepSpeed's JSON as a mapping or a path.
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
    if model is None:
        raise ValueError("deepspeed.initialize: expected model=, got None. Pass the module to train.")
    _check_types(model, optimizer, lr_scheduler)
    model = unwrapped(model)
    values, native = _loaded(_source(args, config, config_params))
    settings = _with_leaf_modules(native, model)
    pipeline = _as_pipeline(model)
    if pipeline is not None and not values.get(_MANAGED, True):
        raise ConfigError(Problem(_MANAGED, "expected true for a pipeline, got False. Remove it."))
    mesh = None if pipeline is None else pipeline.mesh
    loader = None
    if training_data is not None:
        group = None if mesh is None else data_group(mesh)
        loader = make_loader(training_data, settings, group, collate_fn)
    made, lr_scheduler = _chosen(settings, model, optimizer, model_parameters, lr_scheduler)
    inner, prepared = prepare(
        model, made, settings, process_group=mesh, wrap=False, device=accelerator_or_cpu()
    )
    mark_sharded(inner)
    scheduler = None if prepared is None else make_scheduler(lr_scheduler, settings, prepared)
    engine = _engine_class(pipeline)(
        inner, with_parameter_offload(inner, prepared), scheduler, loader, values
    )
    _mark_adapters(inner)
    return engine, engine.optimizer, loader, scheduler


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
    made = make_optimizer(optimizer, settings, model, model_parameters)
    if lr_scheduler is None and settings.scheduler is not None:
        check_scheduler(settings.scheduler, made)
        if settings.scheduler.type in lr_schedules.VALID_LR_SCHEDULES:
            kind = getattr(lr_schedules, settings.scheduler.type)
            lr_scheduler = partial(kind, **settings.scheduler.params)
    return made, lr_scheduler


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
            f"deepspeed.initialize: model: expected a torch.nn.Module, got {show(model)}. Pass the module "
            "to train."
        )
    makers = "one of torch's, a callable that makes it, or None for the JSON's section"
    for name, value, kind in (
        ("optimizer", optimizer, Optimizer),
        ("lr_scheduler", lr_scheduler, LRScheduler),
    ):
        if not (value is None or isinstance(value, kind) or callable(value)):
            raise TypeError(
                f"deepspeed.initialize: {name}: expected {makers}, got {show(value)}. Pass one of these."
            )
    if isinstance(lr_scheduler, LRScheduler) and not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"deepspeed.initialize: lr_scheduler: expected one over optimizer=, got {show(lr_scheduler)} "
            "without that. Pass its optimizer as well, or a callable that makes the scheduler."
        )


def _source(args: Any, *value: Mapping[str, Any] | str | Path | None) -> Mapping[str, Any] | str | Path:
    """Return the one configuration among ``config``, ``config_params`` (its older name) and that of
    ``args``.
    """
    sources = [source for source in value if source is not None]
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
    return sources[0]


def _loaded(source: Mapping[str, Any] | str | Path) -> tuple[dict[str, Any], ZeroConfig]:
    """Return the JSON as given and what it means here."""
    values = json_values("deepspeed.initialize", source)
    own = values.get(_MANAGED) is False  # the engine's own: the native configuration has no such key
    others = {name: value for name, value in values.items() if not (own and name == _MANAGED)}
    written = dataclasses.replace(read_config(others), deepspeed=True)
    config, notes = written.resolved()
    join_world(config.timeout_seconds)
    for note in notes:
        log_dist_once(str(note), ranks=[0])
    return values, config


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
