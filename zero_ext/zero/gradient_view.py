"""``param.grad`` as the user sees it between backward and step: the true gradient, or a sharded one."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zero_ext.zero.expert import expert_ranks
from zero_ext.zero.gradients import UnitGradients
from zero_ext.zero.local_part import is_split, like_parameter, local_gradient
from zero_ext.zero.sharded_gradient import ShardedGradient

if TYPE_CHECKING:
    from zero_ext.zero.engine import Engine


class GradientViews:
    """Keeps ``param.grad`` and the flat gradients in step; the access behind :class:`ShardedGradient`.

    A parameter has a gradient exactly if ``param.grad`` is not None, as in torch: setting it to None
    clears it, assigning a tensor replaces it (where this rank holds the whole gradient).
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
        if norm_type == 2:
            value = self._engine.norms.of(gradients, number)
        elif norm_type == float("inf"):
            value = self._engine.norms.largest(gradients, number)
        else:
            raise RuntimeError(
                f"norms of sharded gradients are the 2-norm and the inf-norm, not {norm_type:g}"
            )
        return torch.tensor(value, dtype=torch.float32, device=self._engine.device)

    def scale(self, key: object, factor: torch.Tensor | float) -> None:
        """See :class:`GradientAccess`."""
        self._refuse("scaling param.grad")
        gradients, number = self._find(key)
        self._settle()
        gradients.scale_parameter(number, factor)
        self._engine.norms.forget()

    def zero(self, key: object) -> None:
        """See :class:`GradientAccess`."""
        self._engine.optimizer_step.refuse_pending("zeroing param.grad")
        gradients, number = self._find(key)
        gradients.zero_parameter(number)
        self._engine.norms.forget()

    def _refuse(self, what: str) -> None:
        self._engine.optimizer_step.refuse_pending(what)
        self._engine.optimizer_step.refuse_local(what)

    def _settle(self) -> None:
        reducer = self._engine.reducer
        if not reducer.settled and not reducer.settle():
            raise RuntimeError(
                "after no_sync() or inside an accumulation the ranks hold gradients of different parameters, "
                "so a norm taken over param.grad would differ between them. Use "
                "model.clip_grad_norm_(max_norm), or take the norm after the pass that reduces."
            )

    def _find(self, key: Any) -> tuple[UnitGradients, int]:
        unit, number = key
        return self._engine.reducer.gradients[unit], number

    def _placeholder(self, parameter: nn.Parameter, gradients: UnitGradients, number: int) -> ShardedGradient:
        if parameter not in self._placeholders:
            name = gradients.unit.layout.specs[number].name
            # Neither key nor access refers to the parameter, which would keep itself alive by its gradient.
            key = (self._engine.reducer.gradients.index(gradients), number)
            self._placeholders[parameter] = ShardedGradient(parameter, weakref.proxy(self), key, name)
        return self._placeholders[parameter]

    def _replace(self, gradients: UnitGradients, number: int, value: torch.Tensor) -> None:
        self._engine.optimizer_step.refuse_pending("assigning param.grad")
        view, name = gradients.full_view(number), gradients.unit.layout.specs[number].name
        if view is None or isinstance(value, ShardedGradient):
            raise RuntimeError(
                f"'{name}'.grad was assigned a tensor, but its gradient is sharded over the ranks, lies on "
                "NVMe or ends with its update inside backward. Scale it in place "
                "(param.grad.mul_(factor)) or change it inside the loss."
            )
        gradients.assign(number, view, local_gradient(gradients.unit.parameters[number], value))
        self._shown[gradients.unit.parameters[number]] = value
        self._engine.norms.forget()
