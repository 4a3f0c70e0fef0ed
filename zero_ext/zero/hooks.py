"""Forward and output hooks that make a block's units present while it runs, forward and backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from zero_ext.activation import Checkpointing
from zero_ext.zero.backward import BackwardPass, in_backward
from zero_ext.zero.frames import Call, CallStack, opaque_in, tensors_in
from zero_ext.zero.residency import Residency
from zero_ext.zero.step_clock import Beginning, StepClock
from zero_ext.zero.tiling import Tile
from zero_ext.zero.unit import Unit

_USES = "_zero_ext_uses"


class ForwardHooks:
    """Hooks on the modules that own or contain sharded parameters.

    A module that runs as a block (a home of units, or the root) opens a :class:`Call`. Owner hooks and reads
    of ``module.weight`` touch units for the running call. Leaving the block lets go of them; hooks on the
    block's outputs take them again in backward, hooks on its inputs let go when their gradients are there.
    """

    def __init__(
        self, residency: Residency, backward: BackwardPass, check: Callable[[], None], clock: StepClock
    ) -> None:
        self.calls = CallStack()
        self._clock = clock
        self._began: Beginning | None = None
        self.checkpointing = Checkpointing()  # what checkpointed calls do inside a forward
        self._inside = ExitStack()
        self.gathers_saved_tensors = False  # then outputs need not be found: backward gathers what it unpacks
        self._residency = residency
        self._backward = backward
        self._check = check

    def touch(self, unit: Unit, home: nn.Module | None) -> None:
        """Makes ``unit`` present for the running call; outside any call it stays as it is."""
        if self.calls:
            call = self.calls.holder_for(home)
            call.touch(unit)
            self._residency.need(unit, call, self._order())

    def enter(self, home: nn.Module, name: str, inputs: object) -> None:
        """Before a block's forward."""
        call = Call(home, name, in_backward())
        outermost = not self.calls and not in_backward()
        self.calls.push(call)  # first, for torch calls `leave` also when a check here raises
        if outermost:
            self._began = self._clock.begin()
            self._backward.abandon()
            self._check()
            self._inside.enter_context(self.checkpointing)
            self._residency.forward_order.begin(repeats=not torch.is_grad_enabled())
        if torch.is_grad_enabled():
            self._watch_inputs(call, inputs)

    def leave(self, home: nn.Module, outputs: object) -> None:
        """After a block's forward, also when it raised."""
        call = self.calls.pop(home)
        forward_only = isinstance(home, Tile) and not call.inputs
        recomputing = in_backward() and not forward_only
        try:
            if torch.is_grad_enabled() and not forward_only and (call.touched or not self.calls):
                self._watch_outputs(call, outputs)
                if not recomputing:
                    self._backward.expect(call)
        finally:
            if recomputing:
                # The gradients of this call are yet to come: hooks of its inputs, or the end, let go.
                self._backward.hold(call)
            else:
                self._let_go(call)

    def _let_go(self, call: Call) -> None:
        for unit in call.touched:
            self._residency.let_go(unit, call)
        if not self.calls:
            self._inside.close()
            self._residency.end_pass(self._order())
            began, self._began = self._began, None
            self._clock.end("forward", began, torch.is_grad_enabled())

    def _order(self) -> Any:
        return self._residency.backward_order if in_backward() else self._residency.forward_order

    def _watch_inputs(self, call: Call, inputs: object) -> None:
        watched = {id(tensor): tensor for tensor in tensors_in(inputs) if tensor.requires_grad}
        call.inputs = len(watched)
        call.takes_leaves = any(tensor.grad_fn is None for tensor in watched.values())

        def arrived(_: torch.Tensor) -> None:
            call.awaited -= 1
            if call.awaited == 0:
                self._backward.let_go(call)

        for tensor in watched.values():
            uses = _uses_of(tensor)
            if uses is None:
                tensor.register_hook(arrived)
            else:
                uses.append(arrived)

    def _watch_outputs(self, call: Call, outputs: object) -> None:
        tensors = list(tensors_in(outputs))
        if not tensors and call.touched and not self.gathers_saved_tensors:
            hidden = next(opaque_in(outputs), None)
            if hidden is not None:
                raise TypeError(
                    f"block '{call.name}' returned {type(hidden).__name__}, in which no tensor can be found: "
                    "its parameters could not be gathered again in backward. Return tensors, mappings, "
                    "sequences or dataclasses, or run the step inside 'with "
                    "zero_ext.double_backward(model):'."
                )

        def needed(gradient: torch.Tensor, uses: list[Callable[[torch.Tensor], None]]) -> None:
            # Who used this output is done with its backward: let go there before gathering here.
            for arrived in uses:
                arrived(gradient)
            self._backward.enter()
            self._backward.hold(call)
            for unit in call.touched:
                self._residency.need(unit, call, self._residency.backward_order)

        for tensor in tensors:
            if tensor.requires_grad and tensor.grad_fn is not None:
                uses: list[Callable[[torch.Tensor], None]] = []
                if _uses_of(tensor) is None:
                    setattr(tensor, _USES, (tensor.grad_fn, uses))
                tensor.register_hook(partial(needed, uses=uses))


def _uses_of(tensor: torch.Tensor) -> list[Callable[[torch.Tensor], None]] | None:
    """What to call when the gradient of a block's output is there; None if ``tensor`` is no such output, or
    was changed in place since."""
    node, uses = getattr(tensor, _USES, (None, None))
    return uses if node is not None and node is tensor.grad_fn else None


class GatheringParameters(dict[str, "nn.Parameter | None"]):
    """A module's ``_parameters``: reading one by name makes its unit present for the running call, or does
    whatever else ``touch`` does."""

    def __init__(
        self, parameters: dict[str, nn.Parameter | None], touch: Callable[[nn.Parameter], None]
    ) -> None:
        super().__init__(parameters)
        self.touch = touch

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        if parameter is not None:
            self.touch(parameter)
        return parameter

    def __reduce__(self) -> tuple[type, tuple[dict[str, nn.Parameter | None]]]:
        return (dict, (dict(self.items()),))


def install(
    model: nn.Module,
    hooks: ForwardHooks,
    units: dict[nn.Parameter, tuple[Unit, nn.Module]],
) -> None:
    """Installs owner hooks and block hooks on ``model`` for its sharded parameters.

    Hooks hold the engine's part weakly: dropping the model frees everything without a cycle collection.
    """
    weak = weakref.ref(hooks)
    weak_units = {
        id(parameter): (weakref.ref(unit), weakref.ref(home)) for parameter, (unit, home) in units.items()
    }
    homes = {home for _, home in units.values()} | {model}
    inside_compiled = _modules_inside_compiled(model)

    # Whoever compiles after prepare has these hooks traced, and a gather cannot run inside a graph.
    @torch._dynamo.disable
    def touch(parameter: nn.Parameter) -> None:
        entry, alive = weak_units.get(id(parameter)), weak()
        if entry is None or alive is None or not alive.calls:
            return
        unit = entry[0]()
        if unit is not None:
            with _unseen():
                alive.touch(unit, entry[1]())

    for name, module in model.named_modules():
        own = [parameter for parameter in module._parameters.values() if parameter in units]
        if module in inside_compiled:
            continue
        if own:
            module._parameters = GatheringParameters(module._parameters, touch)
            _install_owner_hook(module, touch)
        if module in homes or (own and isinstance(module, Tile)):
            everything = [parameter for parameter in module.parameters() if parameter in units]
            _install_block_hooks(
                module, name or type(model).__name__, weak, touch, everything if _is_compiled(module) else []
            )


def _install_owner_hook(module: nn.Module, touch: Callable[[nn.Parameter], None]) -> None:
    def before(owner: nn.Module, *_: object) -> None:
        for parameter in owner._parameters.values():
            if parameter is not None:
                touch(parameter)

    module.register_forward_pre_hook(before, prepend=True)


def watch_reads(
    model: nn.Module, parameters: Container[nn.Parameter], read: Callable[[nn.Parameter], None]
) -> None:
    """Has the bound method ``read``, held weakly, called with every parameter that a module's call or code in
    a forward reads, in modules with some of ``parameters``."""
    inside_compiled = _modules_inside_compiled(model)
    weak = weakref.WeakMethod(read)

    @torch._dynamo.disable
    def watched(parameter: nn.Parameter) -> None:
        alive = weak()
        if alive is not None:
            alive(parameter)

    for module in model.modules():
        before = module._parameters
        if module in inside_compiled or not any(own in parameters for own in before.values()):
            continue
        gather = before.touch if isinstance(before, GatheringParameters) else None
        module._parameters = GatheringParameters(before, partial(_read_after, gather, watched))
        _install_owner_hook(module, watched)


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
    whole: list[nn.Parameter],
) -> None:
    weak_home = weakref.ref(module)

    def engine_part(home: nn.Module) -> ForwardHooks | None:
        # A deep copy of the model carries these hooks along; they are not for it.
        return weak() if weak_home() is home else None

    @torch._dynamo.disable
    def before(home: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        alive = engine_part(home)
        if alive is not None:
            with _unseen():
                alive.enter(home, name, (args, kwargs))
            for parameter in whole:
                touch(parameter)

    @torch._dynamo.disable
    def after(home: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: object) -> None:
        alive = engine_part(home)
        if alive is not None:
            with _unseen():
                alive.leave(home, outputs)

    module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    module.register_forward_hook(after, with_kwargs=True, always_call=True)


def _unseen() -> AbstractContextManager[object]:
    """Inside, dispatch modes see nothing: those of selective checkpointing would take the engine's copies,
    which are others when a block is run again, for ops of the block."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()


def _is_compiled(module: nn.Module) -> bool:
    return isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None


def _modules_inside_compiled(model: nn.Module) -> set[nn.Module]:
    return {
        inner
        for module in model.modules()
        if _is_compiled(module)
        for inner in module.modules()
        if inner is not module
    }
