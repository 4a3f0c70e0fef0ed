"""Takes gradients from ``param.grad`` as autograd brings them, and decides when they are reduced."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import torch
from torch import nn

from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.zero.gradients.accumulator import UnitGradients
from zero_ext.zero.gradients.gradient_storage import GradientGeneration
from zero_ext.zero.gradients.reducer import Edits, GradientReducer
from zero_ext.zero.memory.lifetime import Ending
from zero_ext.zero.units.dtensor_local import local_gradient
from zero_ext.zero.units.parameter_marks import mean_over_senders
from zero_ext.zero.units.unit import Unit
from zero_ext.zero.unshard.backward_pass import BackwardPass


class GradientReader(Protocol):
    """The schedule of the updates, which read the gradients."""

    @property
    def needs_local_gradients(self) -> bool:
        """Return whether the next step reads gradients as they are on each rank, unreduced."""

    def gradient_arrived(self, gradients: UnitGradients) -> None:
        """Prepare for a gradient of ``gradients``, which has arrived and is not accumulated yet."""


class GradientCollector(Ending):
    """Moves each gradient from ``param.grad`` to the flat gradient of its unit. Hooks hold it weakly."""

    def __init__(
        self,
        index: Mapping[nn.Parameter, tuple[Unit, int]],
        gradients: Mapping[Unit, UnitGradients],
        reducer: GradientReducer,
        generation: GradientGeneration,
        backward_pass: BackwardPass,
        reader: Callable[[], GradientReader],
        accumulation_steps: int,
        scales_loss: bool,
    ) -> None:
        self._index, self._gradients, self._reducer = index, gradients, reducer
        self._generation, self._backward_pass, self._reader = generation, backward_pass, reader
        self._accumulation_steps, self._scales_loss = accumulation_steps, scales_loss
        self._shards_gradients = any(unit.placement.grads for unit in gradients)
        self._collected = False  # whether the pass under way has brought a gradient
        self.passes = 0  # backward passes that brought gradients since the last step or ``zero_grad``
        self.syncs = True  # whether passes may reduce gradients; False inside :meth:`no_sync`
        self.loss_scaled = False  # whether the loss of the pass to come, or of the one under way, was scaled

    # -- hooks --------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Register the hooks. Frozen parameters get them, too, so that they can be unfrozen later."""
        for parameter in self._index:
            _watch(parameter, self)

    def unwatch(self) -> None:
        """Remove the hooks."""
        for parameter in self._index:
            with torch._C.DisableTorchFunctionSubclass():
                tables = (parameter._backward_hooks or {}, parameter._post_accumulate_grad_hooks or {})
            for table in tables:
                for key, hook in list(table.items()):
                    if getattr(hook, "__module__", "") == __name__:
                        del table[key]

    def prepare(self, parameter: nn.Parameter) -> None:
        """Empty ``parameter.grad`` before autograd accumulates into it.

        Nothing happens while a block is captured: its gradients go to the caller. Replays run this hook.
        """
        if self._backward_pass.is_captured:
            return
        # First, because the start of a pass compares ``param.grad`` with the gradient shown
        # before and reads what the user has assigned. Then it is emptied, because autograd
        # would add to the shown gradient, which the flat one already contains.
        self._backward_pass.enter()
        parameter.grad = None

    def collect(self, parameter: nn.Parameter) -> None:
        """Accumulate ``parameter.grad``, which becomes None, and start the reductions that are due."""
        self._backward_pass.enter()  # it runs, but in a capture, which this refuses
        unit, number = self._index[parameter]
        gradient, parameter.grad = parameter.grad, None
        if unit not in self._gradients:
            raise RuntimeError(
                f"parameter '{unit.layout.specs[number].name}': expected no gradient, as it was "
                "frozen at zero_ext.prepare and is not in the optimizer, got one that nobody would "
                "apply. Give it to the optimizer before prepare, or keep requires_grad False."
            )
        gradients = self._gradients[unit]
        if gradient is None:
            raise zero_ext_bug(f"no gradient arrived for '{unit.layout.specs[number].name}'")
        if self._scales_loss and not self.loss_scaled:
            raise RuntimeError(
                "loss in fp16: expected a scaled one, got loss.backward(). Call "
                "model.backward(loss) or model.scale_loss(loss).backward(). A model that prepare did not "
                "wrap has engine_of(model).scale_loss(loss)."
            )
        self._collected = True
        # Before the gradient is added. Adding may finish a running reduction, and a
        # gradient that comes during one is too late for an update in backward.
        self._reader().gradient_arrived(gradients)
        gradients.add(number, mean_over_senders(parameter, local_gradient(parameter, gradient)))
        if gradients.complete:
            self._reducer.arrived(gradients, self._reduces)

    # -- passes -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward passes add to unreduced local gradients; the next pass outside reduces the sum."""
        before, self.syncs = self.syncs, False
        try:
            yield
        finally:
            self.syncs = before

    @contextlib.contextmanager
    def scaled_pass(self, reduces: bool, micro_batches: int = 1) -> Iterator[None]:
        """Around a backward pass, of ``micro_batches`` together, from gradients of a loss that some rank has
        scaled; unless it ``reduces``, as inside :meth:`no_sync`."""
        self.loss_scaled = True
        self.passes += micro_batches - 1
        with contextlib.nullcontext() if reduces else self.no_sync():
            yield

    @property
    def ends_accumulation(self) -> bool:
        """Return whether the pass under way, or the next one, is the last before the step."""
        return self.syncs and self.passes + 1 >= self._accumulation_steps

    @property
    def _reduces(self) -> bool:
        """Return whether that pass reduces gradients."""
        if self._reader().needs_local_gradients:
            return False
        return self.ends_accumulation or (self.syncs and self._shards_gradients)

    def begin_pass(self, expects_gathers: Callable[[], bool]) -> None:
        """Begin a backward pass. ``expects_gathers`` returns whether gathers are still to come in it."""
        self._collected = False
        local = self._reader().needs_local_gradients
        reduces = self._reduces
        self._reducer.begin_backward(reduces, expects_gathers)
        for gradients in self._gradients.values():
            adds_up = gradients.has_local or not self.ends_accumulation if local else not reduces
            gradients.begin_pass(unreduced=adds_up)

    def passed(self, unit: Unit) -> None:
        """Note that the pass under way brings no more gradients of ``unit``."""
        gradients = self._gradients.get(unit)
        if gradients is not None and self._reduces:
            self._reducer.passed(gradients)

    def end_pass(self) -> None:
        """End the pass: finish its reductions."""
        try:
            if not self._collected:
                # torch.autograd.grad brought none, but passed units: what follows may assign them.
                self._reducer.end_backward(False)
                return
            reduces = self._reduces
            self._reducer.end_backward(reduces)
            self._generation.rounds += 1
            if reduces and self.ends_accumulation:
                # Ranks may have used other parameters, and torch.nn.utils takes norms of visible gradients.
                self._reducer.synchronize()
            self.passes += 1
        finally:
            self.loss_scaled = False

    def abandon_pass(self) -> None:
        """End a pass that an exception has cut off. What it brought is to be cleared."""
        self._reducer.end_backward(False)
        self.loss_scaled = False

    def end_accumulation(self) -> None:
        """Count from 0 again after a step, or after the gradients were cleared."""
        self.passes = 0
        self._generation.rounds += 1

    def clear(self) -> None:
        """Forget all gradients."""
        self._reducer.edits = Edits()
        with torch._C.DisableTorchFunctionSubclass():
            for gradients in self._gradients.values():
                gradients.clear()
                for parameter in gradients.unit.parameters:
                    parameter.grad = None
        self.end_accumulation()


def _watch(parameter: nn.Parameter, collector: GradientCollector) -> None:
    # Also the parameter, because a hook that refers to its own parameter is a cycle.
    weak_collector, weak_parameter = weakref.ref(collector), weakref.ref(parameter)

    def before(_: torch.Tensor) -> None:
        alive, target = weak_collector(), weak_parameter()
        if alive is not None and target is not None:
            alive.prepare(target)

    def after(target: torch.Tensor) -> None:
        alive = weak_collector()
        if alive is not None:
            alive.collect(target)  # type: ignore[arg-type]

    trainable = parameter.requires_grad
    if not (parameter.is_floating_point() or parameter.is_complex()):
        return
    # Torch refuses hooks on tensors that require no gradient.
    parameter.requires_grad_(True)
    parameter.register_hook(before)
    parameter.register_post_accumulate_grad_hook(after)
    parameter.requires_grad_(trainable)
