"""1-bit LAMB on all ranks in one process, written out from the paper and DeepSpeed's order of steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tests.zero.step.one_bit.simulation import BETA1, BETA2, DECAY, EPS, LR, Simulated
from zero_ext import ops

COEFF_BETA, FACTOR_MAX, FACTOR_MIN, THRESHOLD = 0.9, 4.0, 0.5, 0.1


class SimulatedLamb(Simulated):
    """One flat buffer; ``ratios`` and ``factors`` are the parameters' by name."""

    ratios: dict[str, float]
    factors: dict[str, float]
    scalings: dict[str, float]

    def step(self, what: str, gradients: Sequence[torch.Tensor], used: set[str]) -> None:
        if what == "full":
            self.included = self._mask(used)
            total = torch.zeros(self.layout.numel)
            for gradient in gradients:
                total = total + gradient.float()
            self._warm_up((total * (1 / self.ranks)).to(gradients[0].dtype).float(), used)
            return
        super().step(what, gradients, used)

    def blocks(self, used: set[str] | None = None) -> list[tuple[str, slice]]:
        return [
            (spec.name, slice(offset, offset + spec.numel))
            for spec, offset in zip(self.layout.specs, self.layout.offsets, strict=True)
            if used is None or spec.name in used
        ]

    def sizes(self) -> dict[str, float]:
        return {
            name: norm(self.momentum[block]) / math.sqrt(block.stop - block.start)
            for name, block in self.blocks()
        }

    def _raise_variance(self) -> None:
        super()._raise_variance()
        self.fresh = self.variance

    def _floors(self) -> list[slice]:
        return [block for _, block in self.blocks()]

    def _warm_up(self, gradient: torch.Tensor, used: set[str]) -> None:
        self._set_momentum(self._averaged(self.momentum, gradient))
        variance = self.variance * BETA2 + gradient * gradient * (1 - BETA2)
        self.variance = self.fresh = self._where(variance, self.variance)
        self.master = self.master.clone()
        for name, block in self.blocks(used):
            update = self._update(block)[0]
            weights, updates = norm(self.master[block]), norm(update)
            ratio = min(max(weights / updates, 0.01), 10.0) if weights and updates else 1.0
            if ratio != 1:
                self.ratios[name] = COEFF_BETA * self.ratios.get(name, 0.0) + (1 - COEFF_BETA) * ratio
            self.master[block] -= update * (LR * ratio)
        self.parameters = [self.master.to(self.layout.dtype)] * self.ranks

    def _scaled(self, gradients: list[torch.Tensor]) -> None:
        scaling = torch.ones(self.layout.numel, dtype=torch.float64)
        for name, block in self.blocks():
            scaling[block] = self.scalings[name]
        before = self.momentum
        sent = [self._where((self._averaged(before, each) * scaling.float()), before) for each in gradients]
        average = self._all_reduce(sent, self.included) if self.ranks > 1 else sent[0]
        self._set_momentum(average / scaling.float())
        implied = (self.momentum - before * BETA1) / (1 - BETA1)
        self.fresh = self._where(self.fresh * BETA2 + implied * implied * (1 - BETA2), self.fresh)
        self.master = self.master.clone()
        for name, block in self.blocks():
            if self.included[block].all():
                update, direction = self._update(block)
                self.master[block] -= update * (LR * self._ratio(name, block, norm(update), norm(direction)))
        self.parameters = [self.master.to(self.layout.dtype)] * self.ranks

    def _ratio(self, name: str, block: slice, update_norm: float, direction_norm: float) -> float:
        factor = float(((self.variance[block].sqrt() + EPS) / (self.fresh[block].sqrt() + EPS)).max())
        share = min(1.0, direction_norm / update_norm)
        factor = min(max(factor * share + (1 - share), FACTOR_MIN), FACTOR_MAX)
        last = self.factors.get(name, 1.0)
        factor = min(max(factor, last * (1 - THRESHOLD)), last * (1 + THRESHOLD))
        self.factors[name] = factor
        return self.ratios[name] * factor

    def _update(self, block: slice) -> tuple[torch.Tensor, torch.Tensor]:
        direction = self.momentum[block] / (self.variance[block].sqrt() + EPS)
        return direction + self.master[block] * DECAY, direction


def norm(values: torch.Tensor) -> float:
    total = torch.zeros(ops.ACCUMULATOR_ENTRIES, dtype=torch.int64)
    ops.squared_norm_(values.contiguous(), total)
    return float(ops.squared_norm_value(total).sqrt())
