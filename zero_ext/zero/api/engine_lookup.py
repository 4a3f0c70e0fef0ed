"""From a model or a parameter to its engine."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from torch import nn

from zero_ext.config.config_errors import show
from zero_ext.zero.api.engine_state import EngineState
from zero_ext.zero.api.model_parallel_state import ModelParallelState
from zero_ext.zero.engine import Engine
from zero_ext.zero.memory.lifetime import refuse_ended
from zero_ext.zero.units.released_params import set_access

MODULE_ATTRIBUTE = "_zero_ext_engine"
SOURCES_ATTRIBUTE = "_zero_ext_checkpoint_sources"
PARAMETER_ATTRIBUTE = "_zero_ext_engine_ref"


class CheckpointSources(NamedTuple):
    """The parts of a prepared model that checkpoints are made from."""

    full: EngineState | ModelParallelState
    trained: EngineState | ModelParallelState  # without the parameters that nothing trains

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Leave the engine out of a copy: a copied model is an ordinary module."""

    @property
    def own(self) -> EngineState:
        """The state of this rank's engine, which is a part of the model's under model parallelism."""
        return self.full.own if isinstance(self.full, ModelParallelState) else self.full


def attach_engine(model: nn.Module, engine: Engine, sources: CheckpointSources) -> None:
    """Make ``engine`` belong to ``model``, and findable from its parameters."""
    object.__setattr__(model, MODULE_ATTRIBUTE, engine)
    object.__setattr__(model, SOURCES_ATTRIBUTE, sources)
    for parameter in engine.index:
        # Units hold their parameters, so a strong reference would be a cycle that keeps a deleted
        # model.
        setattr(parameter, PARAMETER_ATTRIBUTE, weakref.ref(engine))
        set_access(parameter, engine.access)


def detach_engine(engine: Engine) -> None:
    """Undo :func:`attach_engine` for an engine that is about to end."""
    vars(engine.model).pop(MODULE_ATTRIBUTE)
    vars(engine.model).pop(SOURCES_ATTRIBUTE)
    for parameter in engine.index:
        vars(parameter).pop(PARAMETER_ATTRIBUTE)


def checkpoint_sources(engine: Engine) -> CheckpointSources:
    """Return what checkpoints of the model of ``engine`` are made from."""
    sources: CheckpointSources = vars(engine.model)[SOURCES_ATTRIBUTE]
    return sources


def engine_of(model: nn.Module) -> Engine:
    """Return the engine of a prepared model.

    Args:
        model: what [`prepare`][zero_ext.prepare] returned, or the module inside.

    Returns:
        The engine.

    Raises:
        TypeError: `model` is not a module.
        ValueError: `model` is not prepared.
        RuntimeError: `model` is a wrapper, and its module was prepared again.

    Examples:
        >>> from zero_ext.zero import engine_of
        >>> model, _ = zero_ext.prepare(torch.nn.Linear(4, 2), None, {"stage": 3})
        >>> engine_of(model).world_size
        1
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model: expected a prepared module, got {show(model)}. Check the order of the arguments."
        )
    refuse_ended(model)
    found = vars(model).get(MODULE_ATTRIBUTE)
    if found is None and isinstance(vars(model).get("_modules", {}).get("module"), nn.Module):
        found = vars(model._modules["module"]).get(MODULE_ATTRIBUTE)
    if not isinstance(found, Engine):
        raise ValueError(
            f"model: expected a prepared one, got {type(model).__name__}, which is not. Call "
            "model, optimizer = zero_ext.prepare(...) first."
        )
    return found


def engine_of_parameter(parameter: nn.Parameter) -> Engine:
    """Return the engine that holds ``parameter``; ``ValueError`` if none does."""
    reference = getattr(parameter, PARAMETER_ATTRIBUTE, None)
    engine = reference() if reference is not None else None
    if not isinstance(engine, Engine) or parameter not in engine.index:
        raise ValueError(
            f"parameter of shape {tuple(parameter.shape)}: expected one of a prepared model, got "
            "another. Call zero_ext.prepare first."
        )
    return engine
