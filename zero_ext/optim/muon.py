"""Muon over shards: momentum where the state is, whole matrices orthogonalized at their owners."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.config.tiers import is_stored
from zero_ext.offload import MASTER, Values, put
from zero_ext.optim.elementwise import plain_scalars
from zero_ext.optim.moments import moment_fields
from zero_ext.optim.stepper import RangeStepper, Segment, StepperInputs, Update

BUFFER = "momentum_buffer"


def newton_schulz(matrix: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    """Return an approximation of the orthogonal factor of ``matrix`` [m, n] in bfloat16, as
    ``torch.optim.Muon`` computes it (Jordan et al., "Muon", 2024).

    Args:
        matrix: bfloat16.
        group: settings ns_coefficients, ns_steps and eps.
    """
    a, b, c = group["ns_coefficients"]
    tall = matrix.size(0) > matrix.size(1)
    found = matrix.T if tall else matrix
    found = found / found.norm().clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = found @ found.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        found = torch.addmm(found, polynomial, found, beta=a)
    return found.T if tall else found


def newton_schulz_cost(shape: Sequence[int]) -> int:
    """Return what orthogonalizing a matrix costs, in multiplications of a step: m²n for m rows and n columns,
    m the smaller."""
    rows, columns = sorted(shape[-2:])
    return rows * rows * columns * math.prod(shape[:-2])


def adjusted_lr(group: Mapping[str, Any], shape: Sequence[int]) -> float:
    """Return the learning rate of a matrix, as ``torch.optim.Muon`` adjusts it to its shape."""
    rows, columns = shape[-2:]
    if group["adjust_lr_fn"] == "match_rms_adamw":
        return float(group["lr"]) * 0.2 * math.sqrt(max(rows, columns))
    return float(group["lr"]) * math.sqrt(max(1, rows / columns))


class MuonStepper(RangeStepper):
    """``torch.optim.Muon`` on state in memory, its momentum fp32 or bf16.

    The momentum is averaged where it is, element by element. Directions go to their owners in bf16, which is
    what Newton-Schulz iterates in, and come back as such: nothing is rounded that torch does not round.
    """

    def __init__(self, inputs: StepperInputs) -> None:
        super().__init__(inputs)
        if inputs.whole is None:
            raise zero_ext_bug("whole matrices without what makes them")
        self._whole = inputs.whole
        for owned in self._ranges:
            for kind, field in moment_fields(inputs.moments_dtype, (BUFFER,)).items():
                owned.state.add(kind, field)
        self._group_of = {segment.name: segment.group for owned in self._ranges for segment in owned.segments}

    def step(self, updates: Sequence[Update], scale: torch.Tensor, used: frozenset[str]) -> Iterator[int]:
        """See :class:`Stepper`; a collective. The directions of all ranges exist in bf16 while it runs."""
        directions = {update.index: self._directions(update, scale, used) for update in updates}

        def orthogonal(name: str, matrix: torch.Tensor) -> torch.Tensor:
            return newton_schulz(matrix, self._groups[self._group_of[name]])

        self._whole.apply(directions, used.intersection(self._group_of), orthogonal)
        for index, direction in directions.items():
            self._step_range(index, direction, used)
            yield index

    def _directions(self, update: Update, scale: torch.Tensor, used: frozenset[str]) -> torch.Tensor:
        """Average the momentum, and return the range's directions [n]."""
        owned = self._ranges[update.index]
        tier = owned.state.tier
        (factor,) = self._staging.to_tier(tier, scale)
        directions: torch.Tensor | None = None
        for chunk in self._staging.chunks(tier, update.gradient, None):
            gradient = chunk.gradient.float() * factor
            if directions is None:
                directions = torch.zeros(
                    owned.state.numel, dtype=torch.bfloat16, device=chunk.gradient.device
                )
            for segment in owned.segments:
                first, last = max(segment.begin, chunk.begin), min(segment.end, chunk.end)
                if segment.name not in used or first >= last:
                    continue
                group = self._groups[segment.group]
                own = gradient[first - chunk.begin : last - chunk.begin]
                with owned.state.edit(BUFFER, first, last) as stored:
                    average = stored.float().lerp_(own, 1 - group["momentum"])
                    stored.copy_(average)
                directions[first:last] = (
                    own.lerp(average, group["momentum"]) if group["nesterov"] else average
                )
        return torch.zeros(0, dtype=torch.bfloat16, device="cpu") if directions is None else directions

    def _step_range(self, index: int, directions: torch.Tensor, used: frozenset[str]) -> None:
        owned = self._ranges[index]
        for segment in owned.segments:
            if segment.name not in used or not segment.numel:
                continue
            group = self._groups[segment.group]
            with owned.state.edit(MASTER, segment.begin, segment.end) as master:
                master.mul_(1 - group["lr"] * group["weight_decay"])
                rate = adjusted_lr(group, segment.shape)
                master.add_(directions[segment.begin : segment.end], alpha=-rate)
                if self._flag is not None:
                    self._flag.check(master)
                if owned.output is not None and not is_stored(owned.output.tier):
                    put(owned.output, segment.begin, master, owned.state.tier)
        if owned.output is not None and is_stored(owned.output.tier):
            self._staging.send(owned.state.read(MASTER, 0, owned.state.numel), owned.output, owned.state.tier)

    def values(self, index: int) -> Iterator[tuple[str, Segment, Values]]:
        """See :class:`Stepper`: the momentum."""
        owned = self._ranges[index]
        for segment in owned.segments:
            yield BUFFER, segment, owned.state.view(BUFFER, segment.begin, segment.end)

    def scalars(self) -> dict[str, Any]:
        """See :class:`Stepper`: there are none, in the form that the element-wise steppers give them."""
        return {name: plain_scalars({}) for name in self._group_of}

    def load_scalars(self, state: dict[str, Any]) -> None:
        """See :class:`Stepper`."""
