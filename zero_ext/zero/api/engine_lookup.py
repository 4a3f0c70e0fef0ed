"""From a model or a parameter to its engine: how it is attached, found, guarded against misuse and closed."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from zero_ext.config.config_errors import show
from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.zero.api.engine_state import EngineState, ModelParallelState
from zero_ext.zero.construction.grouping import OwnedParameter
from zero_ext.zero.construction.module_tensors import end_casts
from zero_ext.zero.engine import Engine
from zero_ext.zero.memory.lifetime import end, refuse_ended
from zero_ext.zero.tiling.tiled_layers import set_tile_consensus
from zero_ext.zero.units.collective_errors import raise_on_all_ranks
from zero_ext.zero.units.parameter_marks import expert_ranks
from zero_ext.zero.units.presharded import PreshardedParameter, set_presharded
from zero_ext.zero.units.released_params import plain_class, restore_class, set_access
from zero_ext.zero.units.unit import Unit
from zero_ext.zero.unshard.backward_pass import in_backward
from zero_ext.zero.unshard.hook_installation import uninstall

MODULE_ATTRIBUTE = "_zero_ext_engine"
_SOURCES_ATTRIBUTE = "_zero_ext_checkpoint_sources"
PARAMETER_ATTRIBUTE = "_zero_ext_engine_ref"

OBSTACLES: list[Callable[[Engine], str]] = []
"""Say why an engine cannot be closed now, or nothing, on behalf of packages that this one does not import."""

# The last is what DistributedDataParallel reads of a module first.
_GUARDED = ("__reduce_ex__", "__deepcopy__", "_apply", "share_memory", "_ddp_params_and_buffers_to_ignore")


class CheckpointSources(NamedTuple):
    """The parts of a prepared model that checkpoints are made from."""

    full: EngineState | ModelParallelState
    trained: EngineState | ModelParallelState  # without the parameters that nothing trains

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Leave the engine out of a copy: a copied model is an ordinary module."""

    def of_all_ranks(self, include_frozen: bool = True) -> EngineState | ModelParallelState:
        """Return the state of this engine, or of all parts that ranks have of one model; a collective."""
        source = self.full if include_frozen else self.trained
        if isinstance(source, ModelParallelState):
            source.meet()
        return source

    @property
    def own(self) -> EngineState:
        """The state of this rank's engine, which is a part of the model's under model parallelism."""
        return self.full.own if isinstance(self.full, ModelParallelState) else self.full


def attach_engine(model: nn.Module, engine: Engine, sources: CheckpointSources) -> None:
    """Make ``engine`` belong to ``model``, and findable from its parameters."""
    object.__setattr__(model, MODULE_ATTRIBUTE, engine)
    object.__setattr__(model, _SOURCES_ATTRIBUTE, sources)
    for parameter in engine.index:
        # Units hold their parameters, so a strong reference would be a cycle that keeps a deleted model.
        setattr(parameter, PARAMETER_ATTRIBUTE, weakref.ref(engine))
        set_access(parameter, engine.access)


def checkpoint_sources(engine: Engine) -> CheckpointSources:
    """Return what checkpoints of the model of ``engine`` are made from."""
    sources: CheckpointSources = vars(engine.model)[_SOURCES_ATTRIBUTE]
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


# -- guards: pickling, conversions and torch's own data parallelism would break the link to the shards ------


def guard_module(model: nn.Module, sharded: Iterable[nn.Parameter]) -> None:
    """Make pickling, ``.to()`` and ``share_memory`` of ``model`` and its ``sharded`` parameters right, or an
    error that names the right call. DistributedDataParallel over it is such an error. A deep copy of
    ``model`` is an ordinary model with full values."""
    for parameter in sharded:
        parameter.__reduce_ex__ = _refuse_pickling  # type: ignore[method-assign]
        parameter.share_memory_ = _refuse_sharing  # type: ignore[method-assign]
    weak = weakref.ref(model)
    guards = (
        _refuse_pickling_of_model,
        partial(_deep_copy, weak),
        partial(_convert, weak),
        _refuse_sharing,
        _NoDataParallel(),
    )
    for name, guard in zip(_GUARDED, guards, strict=True):
        object.__setattr__(model, name, guard)


def _refuse_pickling(*_: object) -> Any:
    raise RuntimeError(
        "pickling a sharded parameter: expected a whole value, got a part of it, as this rank has only that. "
        "Use zero_ext.full_state_dict(model), or copy inside 'with zero_ext.gathered(params):' by .clone()."
    )


def _refuse_pickling_of_model(*_: object) -> Any:
    raise RuntimeError(
        "pickling a prepared model: expected a plain one, got one with process groups, "
        "threads and hooks. Use zero_ext.full_state_dict(model) or zero_ext.save_checkpoint."
    )


def _refuse_sharing(*_: object) -> Any:
    raise RuntimeError(
        "share_memory(): expected a plain model, got a prepared one: it would move its parameters away "
        "from their shards. Share a plain copy of the model, filled from zero_ext.full_state_dict(model)."
    )


class _NoDataParallel:
    """Names to ignore, as DistributedDataParallel looks for them, which cannot be read."""

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError(
            "DistributedDataParallel: expected a model that is not prepared, got one from "
            "zero_ext.prepare, which reduces its gradients itself. Use the prepared model as it "
            "is. With Accelerate, use zero_ext.ZeroAccelerator, or pass only the loaders to prepare."
        )


def _alive(weak: weakref.ref[nn.Module]) -> nn.Module:
    model = weak()
    if model is None:
        raise zero_ext_bug("the guard of a deleted model was called")
    return model


def _deep_copy(weak: weakref.ref[nn.Module], memo: dict[int, Any]) -> Any:
    """Copy a model without its guards and hooks."""
    model = _alive(weak)
    # ``copy.deepcopy`` looks methods up on the instance, so it would call this guard again.
    guards = {name: vars(model).pop(name) for name in _GUARDED}
    try:
        copied = copy.deepcopy(model, memo)
    finally:
        vars(model).update(guards)
    uninstall(copied)
    return copied


def _convert(weak: weakref.ref[nn.Module], fn: Callable[..., Any], recurse: bool = True) -> Any:
    """Stand in for ``model._apply``: ``.to()``, ``.half()`` and the like pass if they change nothing."""
    model = _alive(weak)
    tensors = [each for each in (*model.parameters(), *model.buffers()) if not each.is_meta]
    for dtype, device in {(tensor.dtype, tensor.device) for tensor in tensors}:
        moved = fn(torch.empty(0, dtype=dtype, device=device))
        # "cpu" is "cpu:0".
        same = moved.device.type == device.type and (moved.device.index or 0) == (device.index or 0)
        if moved.dtype != dtype or not same:
            raise RuntimeError(
                f"{type(model).__name__}: expected no conversion after zero_ext.prepare, got .to(), "
                ".half(), .bfloat16(), .cuda() or the like, which would break the link between "
                "parameters and their shards. Convert the model, and move it to its device, before "
                "prepare, or set 'precision.dtype' in the configuration."
            )
    return model


# -- the end of an engine, whose shards stay, when its model is prepared again -------------------------------


def engines_before(model: nn.Module, owned: Iterable[OwnedParameter]) -> list[Engine]:
    """Return the engines that have shards of ``model``. ``ValueError`` if one of them is of another model,
    which is no part of this one, or is gone."""
    names = {item.parameter: item.spec.name for item in owned}
    found = (vars(module).get(MODULE_ATTRIBUTE) for module in model.modules())
    engines = {engine: None for engine in found if isinstance(engine, Engine)}
    for parameter, name in names.items():
        reference = getattr(parameter, PARAMETER_ATTRIBUTE, None)
        engine = None if reference is None else reference()
        if reference is None or engine in engines:
            continue
        if engine is None or not names.keys() >= engine.index.keys():
            raise ValueError(
                f"parameter '{name}': it belongs to a prepared model already. Prepare the outermost model."
            )
        engines[engine] = None
    return list(engines)


def close(engines: Sequence[Engine], model: nn.Module) -> None:
    """End ``engines``, which have shards of ``model``; a collective.

    Parameters that were replicated become ordinary ones. Of sharded ones the shards stay where they are, as
    those of :class:`zero_ext.Init`, until the next engine takes them. ``RuntimeError`` on all ranks, with
    nothing changed, if an engine is in use, or what it has begun is not finished, on some rank.
    """
    # All engines are checked before the first one changes, so that an error leaves them as they were.
    for engine in engines:
        check = partial(_refuse_in_use, engine)
        raise_on_all_ranks(engine.collectives, check, "preparing a model again", "Nothing was changed.")
    for engine in engines:
        engine.finish_updates()
    for engine in engines:
        _close(engine, model)


def _refuse_in_use(engine: Engine) -> None:
    engine.optimizer_step.refuse_damage()
    engine.updates.refuse_pending("preparing the model again")
    engine.updates.refuse_drift("preparing the model again")
    problem = _use_of(engine) or next(filter(None, (obstacle(engine) for obstacle in OBSTACLES)), "")
    if problem:
        raise RuntimeError(problem)
    if engine.collector.passes:
        warnings.warn(
            f"the gradients of {engine.collector.passes} backward passes, which no optimizer.step() has "
            "used, are dropped as the model is prepared again. Call step() before to use them, or "
            "zero_grad() to say that they may go.",
            RuntimeWarning,
            stacklevel=2,
        )


def _use_of(engine: Engine) -> str:
    """Return what uses the values of parameters now, as an error says it; nothing if nothing does."""
    passed = engine.backward_pass
    if engine.hooks.calls:
        return "the model is inside a forward; prepare it when the forward has returned"
    if passed.running:
        return (
            "the model is inside a backward pass; prepare it when backward() has returned"
            if in_backward()
            else "a backward pass raised an error; call optimizer.zero_grad() first"
        )
    if engine.prefetcher.borrowers:
        return "parameters are in use inside 'with zero_ext.gathered(...)'; leave the block first"
    if engine.hooks.gathers_saved_tensors:
        return "'with zero_ext.double_backward(model)' is open; leave the block first"
    if not engine.collector.syncs:
        return "'with model.no_sync()' is open; leave the block first"
    if passed.awaited:
        return (
            "outputs of a forward wait for their backward, which needs the parameters as they are; call "
            "backward(), drop the outputs (del loss), or compute them under torch.no_grad()"
        )
    return ""


def _close(engine: Engine, model: nn.Module) -> None:
    reason = (
        f"this engine of {type(engine.model).__name__} was closed: the model was prepared again. Use the "
        "model, engine and optimizer that the last prepare or initialize returned."
    )
    engine.clear_gradients()
    engine.prefetcher.forget_values()
    engine.tiers.device.synchronize()
    for subscriber in engine.subscribers:
        getattr(subscriber, "close", lambda: None)()
    for name in (MODULE_ATTRIBUTE, _SOURCES_ATTRIBUTE):
        vars(engine.model).pop(name)
    # ``model`` may be built around the earlier one or of its layers, so hooks may be on modules
    # that only one of the two has.
    for root in (model, engine.model):
        uninstall(root)
        end_casts(root)
        for name in _GUARDED:
            vars(root).pop(name, None)
        set_tile_consensus(root, None)
    engine.collector.unwatch()
    for parameter in engine.index:
        for name in (PARAMETER_ATTRIBUTE, "__reduce_ex__", "share_memory_"):
            vars(parameter).pop(name, None)
    # Shards are handed over before ``end`` drops the references to them.
    for unit in engine.units:
        _hand_over(engine, unit)
    for ended in (*engine.wrappers, *engine.units, engine.hooks, engine.collector, engine):
        end(ended, reason)


def _hand_over(engine: Engine, unit: Unit) -> None:
    for parameter, spec, start in zip(unit.parameters, unit.layout.specs, unit.layout.offsets, strict=True):
        restore_class(parameter)
        if unit.placement.params:
            replicas = engine.collectives.holders(bool(expert_ranks(parameter)))
            init_args = (unit.storage, unit.collectives, start, replicas, engine.device)
            set_presharded(parameter, PreshardedParameter(spec, unit.layout, *init_args))
        else:
            parameter.__class__ = plain_class(parameter)
