"""``param.grad`` as the user sees it between backward and step: the true gradient, or a sharded one."""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from zero_ext.zero.gradients.accumulator import UnitGradients
from zero_ext.zero.gradients.pending_factors import PendingFactors
from zero_ext.zero.gradients.sharded_gradient import ShardedGradient, Source
from zero_ext.zero.units.collective_errors import refuse_different
from zero_ext.zero.units.dtensor_local import (
    is_distributed,
    is_split,
    like_parameter,
    local_gradient,
    local_part,
    local_value,
    set_data,
    whole_of,
)
from zero_ext.zero.units.expert_params import expert_ranks
from zero_ext.zero.units.flat_layout import in_memory_order
from zero_ext.zero.units.released_params import ReleasedTensor
from zero_ext.zero.units.unallocated_tensor import Extent
from zero_ext.zero.unshard.backward_pass import in_backward

if TYPE_CHECKING:
    from zero_ext.zero.engine import Engine


class GradientViews:
    """Keeps ``param.grad`` and the flat gradients in step; the access behind :class:`ShardedGradient`.

    A parameter has a gradient exactly if ``param.grad`` is not None, as in torch: setting it to None
    clears it, assigning a tensor replaces it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.proxy(engine)
        # Those steps that take a norm need the gradients as they are shown, and other parts of the model
        # would have other factors.
        takes_norm = bool(engine.config.gradient_clipping) or engine.optimizer_step.scales_loss
        alone = engine.collectives.model is None and engine.config.offload.step != "in_backward"
        self.factors = PendingFactors(alone and not takes_norm)
        self._shown: dict[nn.Parameter, _Shown] = {}
        # Of each parameter the last one: the next gradient is shown by it too, unless somebody has kept it.
        self._placeholders: dict[nn.Parameter, _Shown] = {}
        self._lives = itertools.count()
        self._following = False

    def publish(self) -> None:
        """Makes every contributed gradient visible as ``param.grad``."""
        readable = not self._engine.optimizer_step.pending
        self._shown = {}
        with torch._C.DisableTorchFunctionSubclass():
            self._publish(readable)

    def _publish(self, readable: bool) -> None:
        for place, gradients in enumerate(self._engine.reducer.gradients):
            parameters = gradients.unit.parameters
            whole = readable and gradients.home.valid and gradients.whole() is not None
            for number in gradients.contributed:
                parameter = parameters[number]
                # Whoever takes norms of experts here, as torch's clipping, would take another on every rank.
                view = gradients.full_view(number) if whole and not expert_ranks(parameter) else None
                if view is None:
                    shown = self._placeholders.get(parameter) or self._make(parameter, place, number)
                else:
                    shown = _Shown(like_parameter(parameter, view), view.data_ptr())
                self._shown[parameter] = shown
                parameter.grad = shown.tensor

    def forget(self) -> None:
        """The gradients end. Who has kept one has its value, or is told that it is gone."""
        self.factors.clear()
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in list(self._shown):
                self._end(parameter)

    def follow(self) -> None:
        """Follows what the user did to ``param.grad`` since :meth:`publish`: cleared or replaced it; a
        collective if something was replaced."""
        with torch._C.DisableTorchFunctionSubclass():
            cleared, replaced = self._changes()
        self._following = True
        try:
            # All are read before one is written to: two parameters may have exchanged theirs.
            values = [(gradients, number, self._apart(value)) for gradients, number, value in replaced]
        finally:
            self._following = False
        for gradients, numbers in cleared:
            self._clear(gradients, numbers)
        if values:
            self._refuse("assigning param.grad")
            if not self._engine.reducer.settled:
                self._engine.reducer.settle()
        for gradients, number, value in values:
            self.replace(gradients, number, value)

    def _changes(self) -> tuple[list[tuple[UnitGradients, list[int]]], list[_Replaced]]:
        """The gradients that were set to None, and those that are other tensors or have other memory."""
        cleared: list[tuple[UnitGradients, list[int]]] = []
        replaced: list[_Replaced] = []
        for gradients in self._engine.reducer.gradients:
            numbers = []
            for number, parameter in enumerate(gradients.unit.parameters):
                now, shown = parameter.grad, self._shown.get(parameter)
                if now is None:
                    if shown is not None and number in gradients.contributed:
                        numbers.append(number)
                elif shown is None or shown.tensor is not now or shown.has_moved():
                    replaced.append((gradients, number, now))
            if numbers:
                cleared.append((gradients, numbers))
        return cleared, replaced

    def _apart(self, value: torch.Tensor) -> torch.Tensor:
        """``value``, a copy if writing to gradients would change it."""
        if isinstance(value, ShardedGradient | ReleasedTensor):
            return value.clone()
        with torch._C.DisableTorchFunctionSubclass():
            storage = local_part(value).untyped_storage()._cdata
            return value.clone() if any(storage == each.storage for each in self._shown.values()) else value

    def _clear(self, gradients: UnitGradients, numbers: list[int]) -> None:
        self._engine.optimizer_step.refuse_pending("clearing param.grad")
        with torch._C.DisableTorchFunctionSubclass():
            for number in numbers:
                self.factors.drop(gradients, number)
                self._end(gradients.unit.parameters[number])
        if len(numbers) == len(gradients.contributed):
            gradients.clear()
        else:
            for number in numbers:
                gradients.clear_parameter(number)

    def _end(self, parameter: nn.Parameter) -> None:
        entry = self._shown.pop(parameter)
        shown, is_placeholder = entry.tensor, self._placeholders.get(parameter) is entry
        kept = sys.getrefcount(shown) - 1 > _references(parameter.grad is shown)
        if is_placeholder:
            if kept or _is_known(shown):
                del self._placeholders[parameter]
        elif kept and not is_distributed(shown):
            with torch.no_grad():
                set_data(shown, shown.clone())

    def norm_of(self, key: object, norm_type: float) -> torch.Tensor:
        """See :class:`GradientAccess`."""
        self._refuse("a norm of param.grad")
        gradients, number = self._find(key)
        parameter = gradients.unit.parameters[number]
        if is_split(parameter) or expert_ranks(parameter):
            raise RuntimeError(
                f"a norm of '{gradients.unit.layout.specs[number].name}'.grad, of which other ranks have "
                "other parts, or other experts; call model.clip_grad_norm_(max_norm), which takes the norm "
                "of the whole model"
            )
        self._settle()
        norms = self._engine.norms
        value = norms.of(gradients, number) if norm_type == 2 else norms.largest(gradients, number)
        return value * self.factors.of(gradients, number)

    def scale(self, key: object, factor: float, described: str) -> None:
        """See :class:`GradientAccess`."""
        self._refuse("changing param.grad")
        gradients, number = self._find(key)
        self._settle()
        self._engine.reducer.note_edit(gradients.unit.layout.specs[number].name, described)
        self._multiply(gradients, number, factor)

    def multiply_all(self, factor: float) -> None:
        """Multiplies all settled gradients; in the step, where that is more exact."""
        for gradients in self._engine.reducer.gradients:
            for number in gradients.contributed:
                self._multiply(gradients, number, factor)

    def _multiply(self, gradients: UnitGradients, number: int, factor: float) -> None:
        shown = self._shown.get(gradients.unit.parameters[number])
        self.factors.multiply(gradients, number, factor, seen=shown is None or bool(shown.address))
        self._engine.norms.forget()

    def change(self, key: object, change: Callable[[torch.Tensor], object], described: str) -> None:
        """See :class:`GradientAccess`."""
        self._refuse("changing param.grad")
        gradients, number = self._find(key)
        self._settle()
        self._engine.reducer.note_edit(gradients.unit.layout.specs[number].name, described)
        self.factors.apply(gradients, number)
        gradients.change_parameter(number, change)
        self._engine.norms.forget()

    def zero(self, key: object) -> None:
        """See :class:`GradientAccess`."""
        self._engine.optimizer_step.refuse_pending("zeroing param.grad")
        gradients, number = self._find(key)
        self._engine.reducer.note_edit(gradients.unit.layout.specs[number].name, "zero_")
        self.factors.drop(gradients, number)
        gradients.zero_parameter(number)
        self._engine.norms.forget()

    def read(self, key: object) -> torch.Tensor:
        """See :class:`GradientAccess`."""
        gradients, number = self._find(key)
        name = gradients.unit.layout.specs[number].name
        if in_backward() and not self._following:
            raise RuntimeError(
                f"backward: expected a tensor of its own, got '{name}'.grad, which is sharded over the "
                "ranks. Compute the loss from zero_ext.full_gradient(param)."
            )
        self._refuse("reading param.grad")
        self._settle()
        whole = self.whole(gradients, number)
        if whole is None:
            raise AssertionError(f"a gradient of '{name}' is shown, and there is none")
        return whole

    def write(self, key: object, value: torch.Tensor) -> None:
        """See :class:`GradientAccess`."""
        self._refuse("changing param.grad")
        self.replace(*self._find(key), value)

    def whole(self, gradients: UnitGradients, number: int) -> torch.Tensor | None:
        """A copy of one parameter's whole averaged gradient, None without one; a collective."""
        if number not in gradients.contributed:
            return None
        unit, engine = gradients.unit, self._engine
        layout, parameter = unit.layout, unit.parameters[number]
        flat = torch.empty(layout.numel, dtype=gradients.home.dtype, device=parameter.device)
        own = engine.norms.read_together(lambda: gradients.home.shard().read(0, layout.shard_numel))
        if unit.collectives.world_size == 1:
            flat.copy_(own)
        else:
            label = f"gradient of '{layout.specs[number].name}'"
            unit.collectives.gather(flat, own, "gather_gradients", label, may_be_nan=True).wait()
        flat.mul_(self.factors.of(gradients, number))
        spec = layout.specs[number]
        return whole_of(parameter, flat.as_strided(spec.shape, spec.stride, layout.offsets[number])).clone()

    def replace(self, gradients: UnitGradients, number: int, value: torch.Tensor) -> None:
        """Makes ``value``, whole and alike on all ranks, one parameter's averaged gradient; a collective.
        ``RuntimeError`` on all ranks if theirs differ."""
        parameter, spec = gradients.unit.parameters[number], gradients.unit.layout.specs[number]
        local = local_gradient(parameter, value) if is_distributed(value) else local_value(parameter, value)
        flat = in_memory_order(local.detach(), spec).contiguous()
        refuse_different(
            self._engine.collectives.holders(bool(expert_ranks(parameter))),
            f"the gradient of '{spec.name}' was assigned or written to",
            flat,
            "Average it over the ranks first (torch.distributed.all_reduce), seed random numbers alike, or "
            "let loss.backward() bring it.",
        )
        self.factors.drop(gradients, number)
        gradients.assign(number, flat)
        self._engine.norms.forget()

    def _refuse(self, what: str) -> None:
        self._engine.optimizer_step.refuse_pending(what)
        self._engine.optimizer_step.refuse_local(what)

    def _settle(self) -> None:
        reducer = self._engine.reducer
        if reducer.settled:
            return
        alike = reducer.settle()
        self.publish()
        if not alike:
            raise RuntimeError(
                "after no_sync() or inside an accumulation the ranks hold gradients of different parameters, "
                "so what is done to param.grad would differ between them. Use model.clip_grad_norm_ or "
                "zero_ext.full_gradient(param), or do it after the pass that reduces."
            )

    def _find(self, key: Any) -> tuple[UnitGradients, int]:
        unit, number, _ = key
        gradients = self._engine.reducer.gradients[unit]
        alive = self._placeholders.get(gradients.unit.parameters[number])
        if alive is None or alive.tensor.key != key:  # type: ignore[attr-defined]
            raise RuntimeError(
                f"'{gradients.unit.layout.specs[number].name}'.grad was cleared: expected a use before "
                "optimizer.zero_grad(). Keep param.grad.clone() to use it later."
            )
        return gradients, number

    def _make(self, parameter: nn.Parameter, place: int, number: int) -> _Shown:
        spec = self._engine.reducer.gradients[place].unit.layout.specs[number]
        # Neither key nor access refers to the parameter, which would keep itself alive by its gradient.
        key = (place, number, next(self._lives))
        stride = parameter.stride() if is_distributed(parameter) else spec.stride
        extent = Extent(parameter.dtype, tuple(parameter.shape), stride, 0)
        source = Source(weakref.proxy(self), key, spec.name, extent)
        made = self._placeholders[parameter] = _Shown(ShardedGradient(source, parameter.device), 0)
        return made


_Replaced = tuple[UnitGradients, int, torch.Tensor]


@functools.cache
def _references(is_gradient: bool) -> int:
    """The references to a shown gradient, in one variable, that nobody has kept; torch's versions differ in
    whether a parameter refers to the Python object of its gradient."""
    parameter = nn.Parameter(torch.zeros(1, device="cpu"))
    gradient = torch.zeros(1, device="cpu")
    parameter.grad = gradient if is_gradient else None
    return sys.getrefcount(gradient)


def _is_known(placeholder: Any) -> bool:
    """Whether somebody has a view of it, or has given it attributes."""
    return sys.getrefcount(placeholder._source) > 2 or len(vars(placeholder)) > 2


class _Shown(NamedTuple):
    """What ``param.grad`` was set to, and where a plain tensor lay then."""

    tensor: torch.Tensor
    address: int

    @property
    def storage(self) -> int:
        """The identity of a plain tensor's storage; 0 of a sharded gradient."""
        return local_part(self.tensor).untyped_storage()._cdata if self.address else 0

    def has_moved(self) -> bool:
        """Whether the tensor was given other memory, by ``.data = ...``."""
        return bool(self.address) and local_part(self.tensor).data_ptr() != self.address
