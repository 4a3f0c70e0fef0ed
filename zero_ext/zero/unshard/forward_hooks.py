"""Forward and output hooks that make a block's units present while it runs, and its outputs' own memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from zero_ext.activation import ActivationCheckpointing
from zero_ext.zero.memory.gathered_unit import UnitState
from zero_ext.zero.memory.lifetime import Ending
from zero_ext.zero.tiling import Tile
from zero_ext.zero.units.dtensor_local import is_distributed
from zero_ext.zero.units.plain_torch import in_transform, without_modes
from zero_ext.zero.units.unit import Unit
from zero_ext.zero.unshard.backward_pass import BackwardPass, BlockCall, CallStack, in_backward
from zero_ext.zero.unshard.expert_routing import reached_experts
from zero_ext.zero.unshard.on_demand import transform_refusal
from zero_ext.zero.unshard.prefetcher import Prefetcher
from zero_ext.zero.unshard.step_clock import Beginning, StepClock


def _children(value: object) -> Iterable[object] | None:
    """Return what is directly inside a list, tuple, mapping or dataclass, None for anything else."""
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, list | tuple | set | frozenset):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (getattr(value, field.name) for field in dataclasses.fields(value))
    return None


def tensors_in(value: object, depth: int = 8) -> Iterator[torch.Tensor]:
    """Yield every tensor reachable in nested lists, tuples, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth:
        for child in _children(value) or ():
            yield from tensors_in(child, depth - 1)


def opaque_in(value: object, depth: int = 8) -> Iterator[object]:
    """Yield the objects inside ``value`` that :func:`tensors_in` cannot look into."""
    plain = (torch.Tensor, str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)
    if isinstance(value, plain):
        return
    children = _children(value)
    if children is None:
        yield value
    elif depth:
        for child in children:
            yield from opaque_in(child, depth - 1)


def shares_memory(tensor: torch.Tensor, storages: Container[int]) -> bool:
    """Return whether the memory of ``tensor`` is one of ``storages``."""
    if is_distributed(tensor):
        tensor = tensor._local_tensor
    return tensor.layout is torch.strided and tensor.untyped_storage()._cdata in storages


def with_own_memory(outputs: Any, storages: Container[int]) -> Any:
    """Return ``outputs`` with copies of the tensors in one of ``storages``, as it will be
    released. Autograd connects each copy to its original. Mutable containers and dataclasses are changed in
    place, others are made anew."""

    def own(tensor: torch.Tensor) -> Any:
        return _OwnMemory.apply(tensor) if shares_memory(tensor, storages) else tensor

    return _changed(outputs, own, 8)


def _changed(value: Any, change: Callable[[torch.Tensor], Any], depth: int) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if not depth:
        return value
    if isinstance(value, MutableMapping):
        for key, item in list(value.items()):
            new = _changed(item, change, depth - 1)
            if new is not item:
                value[key] = new
    elif isinstance(value, list):
        value[:] = [_changed(item, change, depth - 1) for item in value]
    elif isinstance(value, tuple | set | frozenset):
        before = list(value)
        items = [_changed(item, change, depth - 1) for item in before]
        if any(new is not item for new, item in zip(items, before, strict=True)):
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            item = getattr(value, field.name)
            new = _changed(item, change, depth - 1)
            if new is not item:
                # Dataclasses may be frozen.
                object.__setattr__(value, field.name, new)
    elif isinstance(value, Mapping):
        pairs = [(key, item, _changed(item, change, depth - 1)) for key, item in value.items()]
        if any(new is not item for _, item, new in pairs):
            return _rebuilt(value, {key: new for key, _, new in pairs})
    return value


def _rebuilt(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return an immutable mapping of the class of ``value`` with ``items``."""
    try:
        return type(value)(items)  # type: ignore[call-arg]
    except TypeError as error:
        raise TypeError(
            f"output of a block: expected a mapping that can be changed or made of a dict, got a "
            f"'{type(value).__name__}' with a view of the block's own parameter. Return a dict."
        ) from error


class _OwnMemory(torch.autograd.Function):
    """The same values and strides in memory of their own."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        if is_distributed(tensor) or tensor.is_conj() or tensor.is_neg():
            # ``set_`` below ignores lazy conjugation and negation, so values would change.
            return tensor.clone()
        # One copy from the first to the last element keeps all strides: gaps stay,
        # and what is expanded stays expanded.
        spans = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        extent = 1 + sum(spans) if tensor.numel() else 0
        memory = tensor.as_strided((extent,), (1,), tensor.storage_offset()).clone()
        # A second ``as_strided`` would return a view, and autograd forbids in-place
        # operations on views that a custom Function returns.
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(memory.untyped_storage(), 0, tensor.shape, tensor.stride())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


class _Connected(torch.autograd.Function):
    """The values of a tensor, in the graph of a ``leaf``, to which it gives no gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(leaf)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        # A checkpointed call runs again where backward reads what it saved, so on all ranks or on none.
        _ = ctx.saved_tensors
        return None, None


_USES = "_zero_ext_uses"
_Uses = list[Callable[[torch.Tensor], None]]


class ForwardHooks(Ending):
    """Hooks on the modules that own or contain sharded parameters.

    A module that runs as a block (it owns units, or is the root) opens a ``BlockCall``. Owner hooks and
    reads of ``module.weight`` gather units for the running call. Leaving the block releases them. Hooks on
    the block's outputs gather them again in backward, and hooks on its inputs release them when the inputs'
    gradients are computed.
    """

    def __init__(
        self,
        prefetcher: Prefetcher,
        backward: BackwardPass,
        check: Callable[[], None],
        clock: StepClock,
        checkpointing: ActivationCheckpointing,
    ) -> None:
        self.calls = CallStack()
        self._clock = clock
        self._began: Beginning | None = None
        self._checkpointing = checkpointing
        self._inside = ExitStack()
        # While everything is gathered, forward passes without gradients need no hooks.
        self.paused = False
        self.gathers_saved_tensors = False  # then outputs need not be found: backward gathers what it unpacks
        self._prefetcher, self._backward, self._check = prefetcher, backward, check
        self._forward_order = prefetcher.forward_order
        # A unit has one storage object throughout, so its identity says which
        # tensors lose their memory with the unit.
        self._storages = frozenset(unit.flat.untyped_storage()._cdata for unit in prefetcher.units)

    def touch(self, unit: Unit, block: nn.Module | None, again: bool = True) -> None:
        """Gather ``unit`` for the running call, and ``again`` for its backward."""
        call = self.calls.holder_for(block)
        if call in unit.holders and (unit in call.rereads or not again):
            return
        if in_transform():
            if unit.state is not UnitState.GATHERED:
                raise RuntimeError(transform_refusal(unit.layout.specs[0].name))
            self._prefetcher.retain_present(unit)  # no hook will gather it for backward
            return
        call.touch(unit, again)
        with without_modes():
            self._prefetcher.need(unit, call, self._order(), experts=call.routed.get(unit))

    def enter(self, block: nn.Module, name: str, inputs: object, alone: bool = False) -> None:
        """Begin a call of ``block``: of a block, or, ``alone``, of a module that no block runs around."""
        call = BlockCall(block, name, in_backward(), alone)
        # A recomputation in backward also begins with no call running. As a new
        # forward it would abandon the pass that it is part of.
        outermost = not self.calls and not in_backward()
        self.calls.append(call)  # first, for torch calls `leave` also when a check here raises
        if outermost:
            self._began = self._clock.begin()
            self._backward.abandon()
            self._check()
            self._inside.enter_context(self._checkpointing)
            self._forward_order = self._prefetcher.order_of_forward()
            self._forward_order.begin(repeats=not torch.is_grad_enabled())
        if torch.is_grad_enabled() and not in_transform():
            self._watch_inputs(call, inputs)

    def route(self, units: Sequence[Unit], experts: int, index: torch.Tensor, inputs: object) -> None:
        """Select the experts, of as many as ``experts``, of ``units`` that the running call, of ``inputs``,
        gathers: those that any rank has in ``index``, the experts of its tokens. A collective. Units that
        stay gathered are in ``units`` where steps update only these experts."""
        partial_units = [unit for unit in units if unit.spec.experts]
        if in_transform() or not (partial_units or torch.is_grad_enabled()):
            return
        first, call = units[0], self.calls[-1]
        if torch.is_grad_enabled():
            differentiated = (*tensors_in(inputs), *(each for unit in units for each in unit.parameters))
            call.joins_backward = any(each.requires_grad for each in differentiated)
        label = f"experts that tokens are routed to in {first.describe()}"
        call.reached = reached = reached_experts(index, experts, first.collectives, label)
        # With all of them the ordinary gather is one collective.
        if len(reached) < experts:
            call.routed.update(dict.fromkeys(partial_units, reached))

    def leave(self, block: nn.Module, outputs: Any) -> Any:
        """End a call of ``block``, also when it raised; return what it shall return. Outputs that share
        memory with parameters get memory of their own, as that memory is released here."""
        call = self.calls.leave(block)
        forward_only = (isinstance(block, Tile) or call.looks_up) and not call.inputs
        recomputing = in_backward() and not forward_only
        try:
            routed = call.reached is not None
            if (call.touched or routed or not self.calls) and not in_transform():
                tensors = list(tensors_in(outputs))
                if any(shares_memory(tensor, self._storages) for tensor in tensors):
                    outputs = with_own_memory(outputs, self._storages)
                    tensors = list(tensors_in(outputs))
                if call.joins_backward and not any(tensor.requires_grad for tensor in tensors):
                    # No token of this rank reaches an expert. Its backward still has to gather, as the other
                    # ranks' backward does. A gradient for the inputs would reach the router, which has none
                    # in one process.
                    leaf = torch.zeros((), device="cpu", requires_grad=True)
                    outputs = _changed(outputs, lambda each: _Connected.apply(each, leaf), 8)
                    tensors = list(tensors_in(outputs))
                if torch.is_grad_enabled() and not forward_only:
                    self._watch_outputs(call, tensors, outputs)
                    if not recomputing:
                        self._backward.expect(call)
            return outputs
        finally:
            if recomputing:
                # The gradients of this call are still to come. Hooks on its inputs
                # release it, or the end of the pass.
                self._backward.hold(call)
            else:
                self._release_call(call)

    def _release_call(self, call: BlockCall) -> None:
        for unit in call.touched:
            # Updates may run in backward. A unit that stayed for a later use would
            # have the values from before them.
            self._prefetcher.release(unit, call, None if in_backward() else self._forward_order)
        if not (self.calls or in_backward()):
            self._inside.close()
            self._prefetcher.end_pass(self._forward_order)
            began, self._began = self._began, None
            self._clock.end("forward", began, torch.is_grad_enabled())

    def _order(self) -> Any:
        return self._prefetcher.backward_order if in_backward() else self._forward_order

    def _watch_inputs(self, call: BlockCall, inputs: object) -> None:
        # By identity, because a tensor that is passed twice gets one gradient.
        watched = {id(tensor): tensor for tensor in tensors_in(inputs) if tensor.requires_grad}
        call.inputs = len(watched)
        call.has_leaf_inputs = any(tensor.grad_fn is None for tensor in watched.values())

        def arrived(_: torch.Tensor) -> None:
            call.awaited -= 1
            if call.awaited == 0:
                self._backward.release(call)

        for tensor in watched.values():
            # Hooks on one tensor run in the order of registration. The hook of the block that
            # made this tensor would gather its units before this one releases, and one unit more
            # than the cap would be live. So the hook of that block calls this one first.
            uses = _uses_of(tensor)
            if uses is None:
                tensor.register_hook(arrived)
            else:
                uses.append(arrived)

    def _watch_outputs(self, call: BlockCall, tensors: list[torch.Tensor], outputs: object) -> None:
        if not tensors and call.rereads and not self.gathers_saved_tensors:
            hidden = next(opaque_in(outputs), None)
            if hidden is not None:
                self._prefetcher.retain(
                    call.rereads,
                    f"block '{call.name}' returned {type(hidden).__name__}, in which no tensor can be found, "
                    "so its backward cannot be foreseen",
                )

        if not any(tensor.requires_grad for tensor in tensors):
            self._backward.note_reached(call)  # no hook below will say when its backward begins

        def needed(gradient: torch.Tensor, uses: _Uses) -> None:
            # The calls that used this output have ended their backward. They release before this one gathers.
            for arrived in uses:
                arrived(gradient)
            self._backward.enter()
            # Autograd enables gradients in a hook only for create_graph=True. Then a
            # second backward will read these values, and no hook announces it.
            if torch.is_grad_enabled() and not self.gathers_saved_tensors:
                self._prefetcher.retain(call.rereads, "backward with create_graph=True")
            self._backward.hold(call)
            order = self._prefetcher.backward_order
            for unit in call.rereads:
                self._prefetcher.need(unit, call, order, experts=call.routed.get(unit))

        for tensor in tensors:
            if tensor.requires_grad and tensor.grad_fn is not None:
                uses: _Uses = []
                # A block may return the output of a block inside it. That one has the first
                # hook, so its list stays. An in-place operation gives the tensor a new node,
                # while hooks stay on the old one. The node is stored to detect that.
                if _uses_of(tensor) is None:
                    setattr(tensor, _USES, (tensor.grad_fn, uses))
                tensor.register_hook(partial(needed, uses=uses))
                # An in-place operation on a view drops the view's node, and with it the hook above.
                base = tensor._base
                if base is not None and base.grad_fn is not None:
                    base.register_hook(partial(needed, uses=[]))


def _uses_of(tensor: torch.Tensor) -> _Uses | None:
    """Return what to call when the gradient of a block's output is there; None if ``tensor`` is no such
    output, or was changed in place since."""
    node, uses = getattr(tensor, _USES, (None, None))
    return uses if node is not None and node is tensor.grad_fn else None
