"""``param.grad`` as the user sees it between backward and step: the true gradient, or a sharded one."""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from zero_ext.comm import Collectives
from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.zero.gradients.accumulator import UnitGradients
from zero_ext.zero.gradients.gradient_norms import GradientNorms
from zero_ext.zero.gradients.reducer import GradientReducer
from zero_ext.zero.gradients.sharded_gradient import GradientSource, ShardedGradient
from zero_ext.zero.units.collective_errors import refuse_different
from zero_ext.zero.units.dtensor_local import (
    full_tensor_of,
    is_distributed,
    is_split,
    like_parameter,
    local_gradient,
    local_tensor,
    local_value,
    set_data,
)
from zero_ext.zero.units.flat_layout import in_memory_order
from zero_ext.zero.units.parameter_marks import expert_ranks
from zero_ext.zero.units.placeholder import ViewSpec
from zero_ext.zero.units.released_params import ReleasedTensor
from zero_ext.zero.unshard.backward_pass import in_backward
from zero_ext.zero.unshard.on_demand import UpdateGuard


class PendingFactors(dict[tuple[UnitGradients, int], float]):
    """Factors that reduced gradients in 16 bits are still to be multiplied with, by unit and parameter.

    ``torch.nn.utils.clip_grad_norm_`` multiplies each gradient in place, which rounds it once more than
    clipping inside the step does. A first factor of at most 1 is therefore stored with a gradient that nobody
    sees without asking: a :class:`ShardedGradient`. The step multiplies with it where all gradients have the
    same one. Whatever else changes a gradient applies its factor first.
    """

    def __init__(self, allowed: bool) -> None:
        super().__init__()
        self._allowed = allowed

    def multiply(self, gradients: UnitGradients, number: int, factor: float, *, seen: bool) -> None:
        """Multiply a gradient with ``factor``, now or later; ``seen``: its memory is the user's too."""
        if factor == 1.0:
            return
        self.apply(gradients, number)
        is_wide = gradients.storage.dtype.itemsize >= torch.float32.itemsize
        if seen or is_wide or not self._allowed or not 0.0 <= factor <= 1.0:
            gradients.change_parameter(number, lambda values: values.mul_(factor))
        else:
            self[gradients, number] = factor

    def apply(self, gradients: UnitGradients, number: int) -> None:
        """Round the factor of one gradient into it."""
        factor = self.pop((gradients, number), None)
        if factor is not None:
            gradients.change_parameter(number, lambda values: values.mul_(factor))

    def apply_all(self) -> None:
        """Round all factors into their gradients."""
        for gradients, number in list(self):
            self.apply(gradients, number)

    def common(self, every: Sequence[UnitGradients]) -> float:
        """Return the factor of all gradients of ``every`` unit. If theirs differ, apply them and return 1."""
        found = {self.get((each, number), 1.0) for each in every for number in each.contributed}
        if len(found) == 1:
            return found.pop()
        self.apply_all()
        return 1.0


class GradientViews:
    """Keeps ``param.grad`` and the flat gradients in step; the access behind :class:`ShardedGradient`. A
    parameter has a gradient exactly if ``param.grad`` is not None, as in torch: setting it to None clears it,
    assigning a tensor replaces it."""

    def __init__(
        self,
        reducer: GradientReducer,
        norms: GradientNorms,
        collectives: Collectives,
        guard: Callable[[], UpdateGuard],
        defers_factors: bool,
        on_cleared: Callable[[str], None],
    ) -> None:
        """``on_cleared`` is called with the name of a parameter when the user has cleared its gradient."""
        self._reducer, self._norms, self._collectives, self._guard = reducer, norms, collectives, guard
        self._on_cleared = on_cleared
        self.factors = PendingFactors(defers_factors)
        self._shown: dict[nn.Parameter, _Shown] = {}
        # Of each parameter the last one: the next gradient is shown by it too, unless somebody has kept it.
        self._placeholders: dict[nn.Parameter, _Shown] = {}
        self._lives = itertools.count()
        self._following = False

    def publish(self) -> None:
        """Make every contributed gradient visible as ``param.grad``."""
        readable = not self._guard().pending
        self._shown = {}
        with torch._C.DisableTorchFunctionSubclass():
            for position, gradients in enumerate(self._reducer.gradients):
                parameters = gradients.unit.parameters
                full = readable and gradients.storage.valid and gradients.full() is not None
                for number in gradients.contributed:
                    parameter = parameters[number]
                    # Whoever takes norms of experts, as torch's clipping, would take another on every rank.
                    view = gradients.full_view(number) if full and not expert_ranks(parameter) else None
                    if view is None:
                        shown = self._placeholders.get(parameter) or self._make(parameter, position, number)
                    else:
                        shown = _Shown(like_parameter(parameter, view), view.data_ptr())
                    self._shown[parameter] = shown
                    parameter.grad = shown.tensor

    def forget(self) -> None:
        """End the gradients. A reference that the user has kept gets the value, or raises that it is gone."""
        self.factors.clear()
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in list(self._shown):
                self._end(parameter)

    def follow(self) -> None:
        """Follow what the user did to ``param.grad`` since :meth:`publish`: cleared or replaced it; a
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
            if not self._reducer.synchronized:
                self._reducer.synchronize()
        for gradients, number, value in values:
            self.replace(gradients, number, value)

    def _changes(self) -> tuple[list[tuple[UnitGradients, list[int]]], list[_Replaced]]:
        """Return the gradients that were set to None, and those that are other tensors or in other memory."""
        cleared: list[tuple[UnitGradients, list[int]]] = []
        replaced: list[_Replaced] = []
        for gradients in self._reducer.gradients:
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
            storage = local_tensor(value).untyped_storage()._cdata
            return value.clone() if any(storage == each.storage for each in self._shown.values()) else value

    def _clear(self, gradients: UnitGradients, numbers: list[int]) -> None:
        self._guard().refuse_pending("clearing param.grad")
        with torch._C.DisableTorchFunctionSubclass():
            for number in numbers:
                self.factors.pop((gradients, number), None)
                self._end(gradients.unit.parameters[number])
                self._on_cleared(gradients.unit.layout.specs[number].name)
        if len(numbers) == len(gradients.contributed):
            gradients.clear()
        else:
            for number in numbers:
                gradients.clear_parameter(number)

    def _end(self, parameter: nn.Parameter) -> None:
        entry = self._shown.pop(parameter)
        shown, is_placeholder = entry.tensor, self._placeholders.get(parameter) is entry
        # ``entry`` is one reference more than those that ``_references`` counts.
        referenced = sys.getrefcount(shown) - 1 > _references(parameter.grad is shown)
        if is_placeholder:
            # The next gradient is shown by the same object, unless somebody could take it for this one.
            if referenced or _is_known(shown):
                del self._placeholders[parameter]
        elif referenced and not is_distributed(shown):
            # The next gradient overwrites this memory. A tensor that the user has
            # kept gets memory of its own.
            with torch.no_grad():
                set_data(shown, shown.clone())

    def norm_of(self, key: object, norm_type: float) -> torch.Tensor:
        self._refuse("a norm of param.grad")
        gradients, number = self._find(key)
        parameter = gradients.unit.parameters[number]
        if is_split(parameter) or expert_ranks(parameter):
            raise RuntimeError(
                f"norm of '{gradients.unit.layout.specs[number].name}'.grad: expected a parameter "
                "that every rank has in full, got one with slices or experts on other ranks. Call "
                "model.clip_grad_norm_(max_norm), which takes the norm of the whole model."
            )
        self._synchronize()
        norms = self._norms
        value = norms.of(gradients, number) if norm_type == 2 else norms.largest(gradients, number)
        return value * self.factors.get((gradients, number), 1.0)

    def scale(self, key: object, factor: float, described: str) -> None:
        self._multiply(*self._begin_edit(key, described), factor)

    def _begin_edit(self, key: object, described: str) -> tuple[UnitGradients, int]:
        self._refuse("changing param.grad")
        gradients, number = self._find(key)
        self._synchronize()
        self._reducer.note_edit(gradients.unit.layout.specs[number].name, described)
        return gradients, number

    def clip_norm(self, max_norm: float, norm_type: float, unscale: float) -> torch.Tensor:
        """Scale all synchronized gradients so that their global norm is at most ``max_norm``. Returns the
        norm before, times ``unscale`` (0-d float64). ``norm_type`` is 2 or inf. ``ValueError``: ``norm_type``
        is another one."""
        self.factors.apply_all()
        if norm_type == 2:
            norm = self._norms.total().double() * unscale
        elif norm_type == float("inf"):
            norm = torch.tensor(self._norms.largest_of_all(), dtype=torch.float64, device="cpu") * unscale
        else:
            raise ValueError(
                f"norm_type: expected 2 or inf for sharded gradients, got {norm_type!r}. Choose one of them."
            )
        factor = float(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        if factor < 1.0:
            self.multiply_all(factor)
        return norm

    def multiply_all(self, factor: float) -> None:
        """Multiply all settled gradients; in the step, where that is more exact."""
        for gradients in self._reducer.gradients:
            for number in gradients.contributed:
                self._multiply(gradients, number, factor)

    def _multiply(self, gradients: UnitGradients, number: int, factor: float) -> None:
        shown = self._shown.get(gradients.unit.parameters[number])
        self.factors.multiply(gradients, number, factor, seen=shown is None or bool(shown.address))

    def change(self, key: object, change: Callable[[torch.Tensor], object], described: str) -> None:
        gradients, number = self._begin_edit(key, described)
        self.factors.apply(gradients, number)
        gradients.change_parameter(number, change)

    def zero(self, key: object) -> None:
        self._guard().refuse_pending("zeroing param.grad")
        gradients, number = self._find(key)
        self._reducer.note_edit(gradients.unit.layout.specs[number].name, "zero_")
        self.factors.pop((gradients, number), None)
        gradients.zero_parameter(number)

    def read(self, key: object) -> torch.Tensor:
        gradients, number = self._find(key)
        name = gradients.unit.layout.specs[number].name
        if in_backward() and not self._following:
            raise RuntimeError(
                f"backward: expected a tensor of its own, got '{name}'.grad, which is sharded over the "
                "ranks. Compute the loss from zero_ext.full_gradient(param)."
            )
        self._refuse("reading param.grad")
        self._synchronize()
        full_average = self.full_average(gradients, number)
        if full_average is None:
            raise zero_ext_bug(f"a gradient of '{name}' is shown, and there is none")
        return full_average

    def write(self, key: object, value: torch.Tensor) -> None:
        self._refuse("changing param.grad")
        self.replace(*self._find(key), value)

    def full_average(self, gradients: UnitGradients, number: int) -> torch.Tensor | None:
        """Return a copy of one parameter's full averaged gradient, None without one; a collective."""
        if number not in gradients.contributed:
            return None
        unit = gradients.unit
        layout, parameter = unit.layout, unit.parameters[number]
        flat = torch.empty(layout.numel, dtype=gradients.storage.dtype, device=parameter.device)
        own = self._norms.read_on_all_ranks(lambda: gradients.storage.shard().read(0, layout.shard_numel))
        if unit.collectives.world_size == 1:
            flat.copy_(own)
        else:
            label = f"gradient of '{layout.specs[number].name}'"
            # NCCL ends the process over NaN in a gather of parameters, and a gradient may be NaN.
            unit.collectives.gather(flat, own, "gather_gradients", label, may_be_nan=True).wait()
        flat.mul_(self.factors.get((gradients, number), 1.0))
        spec = layout.specs[number]
        return full_tensor_of(
            parameter, flat.as_strided(spec.shape, spec.stride, layout.offsets[number])
        ).clone()

    def replace(self, gradients: UnitGradients, number: int, value: torch.Tensor) -> None:
        """Make ``value``, full and equal on all ranks, one parameter's averaged gradient; a collective.
        ``RuntimeError`` on all ranks if theirs differ."""
        parameter, spec = gradients.unit.parameters[number], gradients.unit.layout.specs[number]
        local = local_gradient(parameter, value) if is_distributed(value) else local_value(parameter, value)
        flat = in_memory_order(local.detach(), spec).contiguous()
        refuse_different(
            self._collectives.holders(bool(expert_ranks(parameter))),
            f"the gradient of '{spec.name}' was assigned or written to",
            flat,
            "Average it over the ranks first (torch.distributed.all_reduce), seed random numbers alike, or "
            "let loss.backward() bring it.",
        )
        self.factors.pop((gradients, number), None)
        gradients.assign(number, flat)

    def _refuse(self, what: str) -> None:
        self._guard().refuse_pending(what)
        self._guard().refuse_local(what)

    def _synchronize(self) -> None:
        reducer = self._reducer
        if reducer.synchronized:
            return
        alike = reducer.synchronize()
        self.publish()
        if not alike:
            raise RuntimeError(
                "param.grad: expected gradients of the same parameters on all ranks, got others, as "
                "after no_sync() or inside an accumulation. Use model.clip_grad_norm_ or "
                "zero_ext.full_gradient(param), or use param.grad after the pass that reduces."
            )

    def _find(self, key: Any) -> tuple[UnitGradients, int]:
        unit, number, _ = key
        gradients = self._reducer.gradients[unit]
        alive = self._placeholders.get(gradients.unit.parameters[number])
        if alive is None or alive.tensor.key != key:  # type: ignore[attr-defined]
            raise RuntimeError(
                f"'{gradients.unit.layout.specs[number].name}'.grad: expected a use before "
                "optimizer.zero_grad(), got one after it was cleared. Keep param.grad.clone() to use "
                "it later."
            )
        return gradients, number

    def _make(self, parameter: nn.Parameter, position: int, number: int) -> _Shown:
        spec = self._reducer.gradients[position].unit.layout.specs[number]
        # Neither key nor access refers to the parameter, which would keep itself alive by its gradient.
        key = (position, number, next(self._lives))
        stride = parameter.stride() if is_distributed(parameter) else spec.stride
        view_spec = ViewSpec(parameter.dtype, tuple(parameter.shape), stride, 0)
        source = GradientSource(weakref.proxy(self), key, spec.name, view_spec)
        made = self._placeholders[parameter] = _Shown(ShardedGradient(source, parameter.device), 0)
        return made


_Replaced = tuple[UnitGradients, int, torch.Tensor]


@functools.cache
def _references(is_gradient: bool) -> int:
    """Return the references to a shown gradient, in one variable, that nobody has kept; torch's versions
    differ in whether a parameter refers to the Python object of its gradient."""
    parameter = nn.Parameter(torch.zeros(1, device="cpu"))
    gradient = torch.zeros(1, device="cpu")
    parameter.grad = gradient if is_gradient else None
    return sys.getrefcount(gradient)


def _is_known(placeholder: Any) -> bool:
    """Return whether somebody has a view of it, or has given it attributes."""
    # Views share ``_source``. Without any, only the attribute and the argument of ``getrefcount``
    # refer to it. The placeholder itself has two attributes, ``_source`` and ``_view_spec``.
    return sys.getrefcount(placeholder._source) > 2 or len(vars(placeholder)) > 2


class _Shown(NamedTuple):
    """The value that ``param.grad`` was set to, and the address of a plain tensor then."""

    tensor: torch.Tensor
    address: int

    @property
    def storage(self) -> int:
        """The identity of a plain tensor's storage; 0 of a sharded gradient."""
        return local_tensor(self.tensor).untyped_storage()._cdata if self.address else 0

    def has_moved(self) -> bool:
        """Return whether the tensor was given other memory, by ``.data = ...``."""
        return bool(self.address) and local_tensor(self.tensor).data_ptr() != self.address
