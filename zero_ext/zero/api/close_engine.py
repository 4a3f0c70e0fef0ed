"""Close an engine because its model is prepared again. Its shards stay, everything around them goes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from torch import nn

from zero_ext.zero.api.engine_lookup import MODULE_ATTRIBUTE, PARAMETER_ATTRIBUTE, detach_engine
from zero_ext.zero.api.misuse_guards import unguard
from zero_ext.zero.construction.grouping import OwnedParameter
from zero_ext.zero.construction.input_cast import end_casts
from zero_ext.zero.engine import Engine
from zero_ext.zero.memory.lifetime import end
from zero_ext.zero.tiling.tile_consensus import remove_tile_consensus
from zero_ext.zero.units.collective_errors import raise_on_all_ranks
from zero_ext.zero.units.parameter_marks import expert_ranks
from zero_ext.zero.units.presharded import PreshardedParameter, set_presharded
from zero_ext.zero.units.released_params import plain_class, restore_class
from zero_ext.zero.units.unit import Unit
from zero_ext.zero.unshard.backward_pass import in_backward
from zero_ext.zero.unshard.hook_installation import uninstall

OBSTACLES: list[Callable[[Engine], str]] = []
"""Say why an engine cannot be closed now, or nothing, on behalf of packages that this one does not import."""


def engines_before(model: nn.Module, owned: Iterable[OwnedParameter]) -> list[Engine]:
    """Return the engines that have shards of ``model``.

    Raises:
        ValueError: One of them is of another model, which is no part of this one, or is gone.
    """
    names = {item.parameter: item.spec.name for item in owned}
    modules = set(model.modules())
    found = {module: vars(module).get(MODULE_ATTRIBUTE) for module in modules}
    engines = {engine: None for engine in found.values() if isinstance(engine, Engine)}
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
    those of :class:`zero_ext.Init`, until the next engine takes them.

    Raises:
        RuntimeError: An engine is in use, or what it has begun is not finished, on some rank. All ranks raise
            it, and nothing has changed.
    """
    # All engines are checked before the first one changes, so that an error leaves them as they
    # were.
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
    passes = engine.collector.passes
    if passes:
        warnings.warn(
            f"the gradients of {passes} backward passes, which no optimizer.step() has used, are "
            "dropped as the model is prepared again. Call step() before to use them, or zero_grad() to say "
            "that they may go.",
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
    # ``model`` may be built around the earlier one or of its layers, so hooks may be on modules
    # that only one of the two has.
    roots = (model, engine.model)
    for subscriber in engine.subscribers:
        getattr(subscriber, "close", lambda: None)()
    detach_engine(engine)
    for root in roots:
        uninstall(root)
        end_casts(root)
        unguard(root, engine.index)
        remove_tile_consensus(root)
    engine.collector.unwatch()
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
