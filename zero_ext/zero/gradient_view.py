"""``param.grad`` as the user sees it between backward and step: the true gradient, or a sharded one."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zero_ext.zero.backward import in_backward
from zero_ext.zero.expert import expert_ranks
from zero_ext.zero.extent import Extent
from zero_ext.zero.gradients import UnitGradients
from zero_ext.zero.layout import in_memory_order
from zero_ext.zero.local_part import (
    is_distributed,
    is_split,
    like_parameter,
    local_gradient,
    local_value,
    whole_of,
)
from zero_ext.zero.sharded_gradient import ShardedGradient, Source
from zero_ext.zero.together import refuse_different

if TYPE_CHECKING:
    from zero_ext.zero.engine import Engine


class GradientViews:
    """Keeps ``param.grad`` and the flat gradients in step; the access behind :class:`ShardedGradient`.

    A parameter has a gradient exactly if ``param.grad`` is not None, as in torch: setting it to None
    clears it, assigning a tensor replaces it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.proxy(engine)
        self._shown: dict[nn.Parameter, torch.Tensor] = {}
        self._placeholders: dict[nn.Parameter, ShardedGradient] = {}

    def publish(self) -> None:
        """Makes every contributed gradient visible as ``param.grad``."""
        readable = not self._engine.optimizer_step.pending
        self._shown = {}
        with torch._C.DisableTorchFunctionSubclass():
            self._publish(readable)

    def _publish(self, readable: bool) -> None:
        for gradients in self._engine.reducer.gradients:
            for number in gradients.contributed:
                parameter = gradients.unit.parameters[number]
                # Whoever takes norms of experts here, as torch's clipping, would take another on every rank.
                whole = gradients.reduced_valid and readable and not expert_ranks(parameter)
                shown = gradients.full_view(number) if whole else None
                if shown is None:
                    shown = self._placeholder(parameter, gradients, number)
                else:
                    shown = like_parameter(parameter, shown)
                self._shown[parameter] = shown
                parameter.grad = shown

    def note_cleared(self) -> None:
        """Follows what the user did to ``param.grad`` since :meth:`publish`: cleared or replaced it."""
        with torch._C.DisableTorchFunctionSubclass():
            self._note_cleared()

    def _note_cleared(self) -> None:
        for gradients in self._engine.reducer.gradients:
            cleared = []
            for number, parameter in enumerate(gradients.unit.parameters):
                shown = parameter.grad
                if shown is None:
                    if number in gradients.contributed and parameter in self._shown:
                        cleared.append(number)
                elif shown is not self._shown.get(parameter):
                    self._replace(gradients, number, shown)
            if cleared:
                self._engine.optimizer_step.refuse_pending("clearing param.grad")
            if cleared and len(cleared) == len(gradients.contributed):
                gradients.clear()
            else:
                for number in cleared:
                    gradients.clear_parameter(number)

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
        return torch.tensor(value, dtype=torch.float32, device=self._engine.device)

    def change(self, key: object, change: Callable[[torch.Tensor], object]) -> None:
        """See :class:`GradientAccess`."""
        self._refuse("changing param.grad")
        gradients, number = self._find(key)
        self._settle()
        gradients.change_parameter(number, change)
        self._engine.norms.forget()

    def zero(self, key: object) -> None:
        """See :class:`GradientAccess`."""
        self._engine.optimizer_step.refuse_pending("zeroing param.grad")
        gradients, number = self._find(key)
        gradients.zero_parameter(number)
        self._engine.norms.forget()

    def read(self, key: object) -> torch.Tensor:
        """See :class:`GradientAccess`."""
        gradients, number = self._find(key)
        name = gradients.unit.layout.specs[number].name
        if in_backward():
            raise RuntimeError(
                f"backward: expected a tensor of its own, got '{name}'.grad, which is sharded over the "
                "ranks. Compute the loss from zero_ext.full_gradient(param)."
            )
        self._refuse("reading param.grad")
        self._settle()
        whole = self.whole(gradients, number)
        if whole is None:
            raise RuntimeError(f"'{name}'.grad was cleared: expected a use before optimizer.zero_grad().")
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
        gradients.assign(number, flat)
        self._engine.norms.forget()

    def _refuse(self, what: str) -> None:
        self._engine.optimizer_step.refuse_pending(what)
        self._engine.optimizer_step.refuse_local(what)

    def _settle(self) -> None:
        reducer = self._engine.reducer
        if not reducer.settled and not reducer.settle():
            raise RuntimeError(
                "after no_sync() or inside an accumulation the ranks hold gradients of different parameters, "
                "so what is done to param.grad would differ between them. Use model.clip_grad_norm_ or "
                "zero_ext.full_gradient(param), or do it after the pass that reduces."
            )

    def _find(self, key: Any) -> tuple[UnitGradients, int]:
        unit, number = key
        return self._engine.reducer.gradients[unit], number

    def _placeholder(self, parameter: nn.Parameter, gradients: UnitGradients, number: int) -> ShardedGradient:
        if parameter not in self._placeholders:
            spec = gradients.unit.layout.specs[number]
            # Neither key nor access refers to the parameter, which would keep itself alive by its gradient.
            key = (self._engine.reducer.gradients.index(gradients), number)
            stride = parameter.stride() if is_distributed(parameter) else spec.stride
            extent = Extent(parameter.dtype, tuple(parameter.shape), stride, 0)
            source = Source(weakref.proxy(self), key, spec.name, extent)
            self._placeholders[parameter] = ShardedGradient(source, parameter.device)
        return self._placeholders[parameter]

    def _replace(self, gradients: UnitGradients, number: int, value: torch.Tensor) -> None:
        self._refuse("assigning param.grad")
        if isinstance(value, ShardedGradient):
            value = value.clone()
        self.replace(gradients, number, value)
        self._shown[gradients.unit.parameters[number]] = value
