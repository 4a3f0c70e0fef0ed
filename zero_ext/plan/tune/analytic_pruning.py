"""The planner's prediction for a point before it is tried."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zero_ext.config import ZeroConfig
from zero_ext.plan.estimate import estimate_step
from zero_ext.plan.models import ModelSpec
from zero_ext.plan.simulation.hardware import Hardware
from zero_ext.plan.simulation.run_memory import memory_needs
from zero_ext.plan.simulation.training_setup import ACTIVATIONS, Training


@dataclass(frozen=True)
class Prediction:
    """A model and a machine; ``recomputed`` says that the script recomputes activations."""

    model: ModelSpec
    hardware: Hardware
    ranks: int
    recomputed: bool = False

    def why_not(self, config: ZeroConfig) -> str:
        """Return what does not fit, in words; empty if all does."""
        needs = memory_needs(self.model.full_cost, self._training(config), self.hardware)
        return "; ".join(map(str, needs.shortfalls(self.hardware)))

    def samples_per_second(self, config: ZeroConfig) -> float:
        """Of all ranks."""
        training = self._training(config)
        seconds = estimate_step(self.model, training, self.hardware).seconds
        return self.ranks * training.micro_batch * training.accumulation_steps / seconds

    def _training(self, config: ZeroConfig) -> Training:
        return replace(Training.of_config(config, self.ranks), activations=ACTIVATIONS[self.recomputed])
