"""Installs the engine's forward hooks on the modules of a model."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from zero_ext.zero.tiling import Tile
from zero_ext.zero.units.plain_torch import without_modes
from zero_ext.zero.units.unit import Unit
from zero_ext.zero.unshard.expert_routing import StackedExperts, stacked_experts
from zero_ext.zero.unshard.forward_hooks import ForwardHooks


class GatheringParameters(dict[str, "nn.Parameter | None"]):
    """A module's ``_parameters``: reading one by name makes its unit present for the running call, or does
    whatever else ``touch`` does. The next read of each of the ``foreseen`` does not: a hook did it before the
    call that is going to read them."""

    def __init__(
        self, parameters: dict[str, nn.Parameter | None], touch: Callable[[nn.Parameter], None]
    ) -> None:
        super().__init__(parameters)
        self.touch = touch
        self.foreseen: set[str] = set()

    def __getitem__(self, name: str) -> nn.Parameter | None:
        # ``nn.Module.__getattr__`` reads by ``[name]``, and so comes here. Iteration, as
        # in ``parameters()`` or ``state_dict()``, does not and gathers nothing.
        parameter = super().__getitem__(name)
        if name in self.foreseen:
            self.foreseen.discard(name)
        elif parameter is not None:
            self.touch(parameter)
        return parameter

    def __reduce__(self) -> tuple[type, tuple[dict[str, nn.Parameter | None]]]:
        # A copied or pickled module gets a plain dict, because its copy does not belong to the engine.
        return (dict, (dict(self.items()),))


def install(
    model: nn.Module,
    hooks: ForwardHooks,
    units: dict[nn.Parameter, tuple[Unit, nn.Module]],
    mixtures: Mapping[nn.Module, Iterable[Unit]],
) -> None:
    """Install owner hooks and block hooks on ``model`` for its sharded parameters. Hooks hold the engine's
    part weakly: dropping the model frees everything without a cycle collection. In ``mixtures``, with units
    that may stay gathered, they also find the experts that steps update."""
    weak = weakref.ref(hooks)
    # Keyed by id, which no other object gets while the unit lives, as the unit holds its parameters.
    weak_units = {
        id(parameter): (weakref.ref(unit), weakref.ref(block)) for parameter, (unit, block) in units.items()
    }
    blocks = {block for _, block in units.values()} | {model}
    routed = defaultdict[nn.Module, dict[Unit, None]](dict)
    for unit, block in units.values():
        if unit.spec.experts:
            routed[block][unit] = None
    for block, own_units in mixtures.items():
        routed[block].update(dict.fromkeys(own_units))
    blocks |= routed.keys()
    inside_compiled = modules_inside_compiled(model)

    # Whoever compiles after prepare has these hooks traced, and a gather cannot run inside a graph.
    @torch._dynamo.disable
    def touch(parameter: nn.Parameter) -> None:
        entry, alive = weak_units.get(id(parameter)), weak()
        if entry is None or alive is None or not alive.calls:
            return
        unit = entry[0]()
        if unit is not None:
            alive.touch(unit, entry[1]())

    for name, module in model.named_modules():
        if module in inside_compiled:
            continue
        own = {key: each for key, each in module._parameters.items() if each is not None and each in units}
        called = name or type(model).__name__
        # The owner hook comes first. Both are prepended, so the block hook,
        # installed later, runs before it and opens the call that it gathers for. In
        # the other order the owner hook would open a call of its own.
        if own:
            module._parameters = GatheringParameters(module._parameters, touch)
            _install_owner_hooks(module, called, weak, _uses_of(own, units), not looks_up(module))
        if module in blocks or (own and isinstance(module, Tile)):
            # Modules inside a compiled one have no hooks, since a gather cannot run
            # inside a graph. The hooks of the compiled module gather for all of them.
            everything = [parameter for parameter in module.parameters() if parameter in units]
            read_at_entry = everything if _is_compiled(module) else []
            _install_block_hooks(module, called, weak, touch, read_at_entry, _routing_of(module, routed))


class _UnitUse(NamedTuple):
    """A unit that a module's forward needs, as long as the module has these parameters of it."""

    parameters: tuple[tuple[str, nn.Parameter], ...]
    unit: weakref.ref[Unit]
    block: weakref.ref[nn.Module]


def _uses_of(
    own: dict[str, nn.Parameter], units: dict[nn.Parameter, tuple[Unit, nn.Module]]
) -> tuple[_UnitUse, ...]:
    found: dict[tuple[Unit, nn.Module], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in own.items():
        found.setdefault(units[parameter], []).append((name, parameter))
    return tuple(
        _UnitUse(tuple(parameters), weakref.ref(unit), weakref.ref(block))
        for (unit, block), parameters in found.items()
    )


class _Routing(NamedTuple):
    """The units with the experts of a module, and where a call of it has the experts of its tokens."""

    units: tuple[weakref.ref[Unit], ...]
    experts: StackedExperts


def _routing_of(module: nn.Module, routed: Mapping[nn.Module, Iterable[Unit]]) -> _Routing | None:
    experts = stacked_experts(module) if module in routed else None
    return None if experts is None else _Routing(tuple(map(weakref.ref, routed[module])), experts)


def _install_owner_hooks(
    module: nn.Module, name: str, weak: weakref.ref[ForwardHooks], uses: tuple[_UnitUse, ...], again: bool
) -> None:
    """Let a call of ``module`` gather its units for the running block or itself, ``again`` in backward."""
    weak_owner = weakref.ref(module)
    ends_alone = False

    @torch._dynamo.disable
    def after(owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> Any:
        alive = weak()
        if alive is None or not alive.calls.runs_alone(owner):
            return None
        with without_modes():
            return alive.leave(owner, outputs)

    @torch._dynamo.disable
    def before(owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal ends_alone
        alive = weak()
        if alive is None or alive.paused or weak_owner() is not owner:
            return
        if not alive.calls:
            if not ends_alone:
                ends_alone = True
                # Torch reads its forward hooks after the forward, so this one
                # already ends the call that begins here.
                owner.register_forward_hook(after, with_kwargs=True, always_call=True)
            with without_modes():
                alive.enter(owner, name, (args, kwargs), alone=True)
        own = owner._parameters
        foreseen: set[str] = set()
        for parameters, unit, block in uses:
            # torch.func.functional_call puts other tensors in the place of parameters.
            present = [key for key, parameter in parameters if dict.get(own, key) is parameter]
            needed = unit()
            if present and needed is not None:
                alive.touch(needed, block(), again)
                foreseen.update(present)
        # Names that the call before did not read must not stay here: the next read
        # of them would gather nothing.
        if isinstance(own, GatheringParameters):
            own.foreseen = foreseen

    # Prepended, because hooks of the user may read the weights, too.
    module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)


def watch_reads(
    model: nn.Module, parameters: Container[nn.Parameter], read: Callable[[nn.Parameter], None]
) -> None:
    """Has the bound method ``read``, held weakly, called with every parameter that a module's call or code in
    a forward reads, in modules with some of ``parameters``."""
    inside_compiled = modules_inside_compiled(model)
    weak = weakref.WeakMethod(read)

    @torch._dynamo.disable
    def watched(parameter: nn.Parameter) -> None:
        alive = weak()
        if alive is not None:
            alive(parameter)

    def before_call(owner: nn.Module, *_: object) -> None:
        for parameter in owner._parameters.values():
            if parameter is not None:
                watched(parameter)

    for module in model.modules():
        before = module._parameters
        if module in inside_compiled or not any(own in parameters for own in before.values()):
            continue
        gather = before.touch if isinstance(before, GatheringParameters) else None
        module._parameters = GatheringParameters(before, partial(_read_after, gather, watched))
        # Reads that the owner hook foresaw do not call ``touch``, so they are reported before the call.
        module.register_forward_pre_hook(before_call, prepend=True)


def _read_after(
    gather: Callable[[nn.Parameter], None] | None,
    read: Callable[[nn.Parameter], None],
    parameter: nn.Parameter,
) -> None:
    if gather is not None:
        gather(parameter)
    read(parameter)


def _install_block_hooks(
    module: nn.Module,
    name: str,
    weak: weakref.ref[ForwardHooks],
    touch: Callable[[nn.Parameter], None],
    read_at_entry: list[nn.Parameter],
    routing: _Routing | None,
) -> None:
    weak_block = weakref.ref(module)

    def own_hooks(block: nn.Module) -> ForwardHooks | None:
        # A deep copy of the model has these hooks, too, but no engine that they could serve.
        alive = weak() if weak_block() is block else None
        if alive is None or not alive.paused:
            return alive
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"block '{name}': expected no gradients inside 'with "
                "zero_ext.unsharded_for_generation(...)', got a forward pass with gradients. Run it outside "
                "the block."
            )
        return None

    @torch._dynamo.disable
    def before(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        alive = own_hooks(block)
        if alive is not None:
            with without_modes():
                alive.enter(block, name, (args, kwargs))
                if routing is not None:
                    routed = [unit for each in routing.units if (unit := each()) is not None]
                    index = routing.experts.index_in(name, args, kwargs)
                    alive.route(routed, routing.experts.experts, index, (args, kwargs))
            for parameter in read_at_entry:
                touch(parameter)

    @torch._dynamo.disable
    def after(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> Any:
        alive = own_hooks(block)
        if alive is None:
            return None
        with without_modes():
            return alive.leave(block, outputs)

    module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    module.register_forward_hook(after, with_kwargs=True, always_call=True)


def uninstall(model: nn.Module) -> None:
    """Remove the hooks of an engine from its model, or from a deep copy of that."""
    for module in model.modules():
        if isinstance(module._parameters, GatheringParameters):
            module._parameters = dict(module._parameters.items())
        for kind in ("_forward_pre_hooks", "_forward_hooks"):
            hooks, with_kwargs = getattr(module, kind), getattr(module, f"{kind}_with_kwargs")
            # By their module instead of by handles, because a deep copy has the hooks but no handles.
            for key in [key for key, hook in hooks.items() if getattr(hook, "__module__", "") == __name__]:
                for table in (hooks, with_kwargs, module._forward_hooks_always_called):
                    table.pop(key, None)


def looks_up(module: nn.Module) -> bool:
    """Return whether a call of ``module`` selects rows of its weight, which its backward does not read."""
    return type(module).forward is nn.Embedding.forward and "forward" not in vars(module)


def _is_compiled(module: nn.Module) -> bool:
    return isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None


def modules_inside_compiled(model: nn.Module) -> set[nn.Module]:
    return {
        inner
        for module in model.modules()
        if _is_compiled(module)
        for inner in module.modules()
        if inner is not module
    }
