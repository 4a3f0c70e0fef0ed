"""Factors that clipping by calls left for the step, which applies them in float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zero_ext.zero.gradients.accumulator import UnitGradients


class PendingFactors:
    """Factors that reduced gradients in 16 bits are still to be multiplied with, by unit and parameter.

    ``torch.nn.utils.clip_grad_norm_`` multiplies each gradient in place, which rounds it once more than
    clipping inside the step does. A first factor of at most 1 is therefore stored with a gradient that nobody
    sees without asking: a :class:`ShardedGradient`. The step multiplies with it where all gradients have the
    same one. Whatever else changes a gradient applies its factor first.
    """

    def __init__(self, allowed: bool) -> None:
        self._allowed = allowed
        self._factors: dict[tuple[UnitGradients, int], float] = {}

    def multiply(self, gradients: UnitGradients, number: int, factor: float, *, seen: bool) -> None:
        """Multiply a gradient with ``factor``, now or later; ``seen``: its memory is the user's too."""
        if factor == 1.0:
            return
        self.apply(gradients, number)
        is_wide = gradients.storage.dtype.itemsize >= torch.float32.itemsize
        if seen or is_wide or not self._allowed or not 0.0 <= factor <= 1.0:
            gradients.change_parameter(number, lambda values: values.mul_(factor))
        else:
            self._factors[gradients, number] = factor

    def of(self, gradients: UnitGradients, number: int) -> float:
        """Return the factor of a gradient, 1 where there is none."""
        return self._factors.get((gradients, number), 1.0)

    def apply(self, gradients: UnitGradients, number: int) -> None:
        """Round the factor of one gradient into it."""
        factor = self._factors.pop((gradients, number), None)
        if factor is not None:
            gradients.change_parameter(number, lambda values: values.mul_(factor))

    def apply_all(self) -> None:
        """Round all factors into their gradients."""
        for gradients, number in list(self._factors):
            self.apply(gradients, number)

    def drop(self, gradients: UnitGradients, number: int) -> None:
        """Forget the factor of a gradient that is replaced."""
        self._factors.pop((gradients, number), None)

    def clear(self) -> None:
        """All gradients end."""
        self._factors.clear()

    def common(self, every: Sequence[UnitGradients]) -> float:
        """Return the factor that all gradients of ``every`` unit have; without one, 1, and factors are
        applied."""
        found = {self.of(each, number) for each in every for number in each.contributed}
        if len(found) == 1:
            return found.pop()
        self.apply_all()
        return 1.0
