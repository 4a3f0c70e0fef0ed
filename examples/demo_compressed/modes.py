"""The ways to train that the demonstration sets side by side: an optimizer and a configuration each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import zero_ext
from demo_compressed.settings import CompressedSettings

BETAS = (0.9, 0.95)  # a variance that soon forgets the first, large gradients may be frozen early


@dataclass(frozen=True)
class TrainingMode:
    """`stage` and the keys of `communication`; `against` names the uncompressed way it is judged by."""

    title: str
    optimizer: str
    stage: int
    communication: dict[str, Any]
    against: str | None = None

    def config(self, settings: CompressedSettings) -> dict[str, Any]:
        """What `zero_ext.prepare` takes."""
        nodes = {"ranks_per_node": settings.ranks_per_node}
        return {
            "stage": self.stage,
            "precision": {"dtype": "bf16"},
            "communication": {**nodes, **self.communication},
        }

    def build(
        self, parameters: Iterable[nn.Parameter], settings: CompressedSettings
    ) -> torch.optim.Optimizer:
        """The optimizer, as a user would make it."""
        common = {"lr": settings.learning_rate, "betas": BETAS}
        if self.optimizer == "onebit":
            return zero_ext.OneBitAdam(parameters, freeze_step=settings.warm_up, **common)
        if self.optimizer == "zero_one":
            # The published policy updates the variance ever more seldom after 16 steps: meant for runs
            # hundreds of times as long, it leaves too few updates here.
            return zero_ext.ZeroOneAdam(
                parameters,
                var_freeze_step=settings.warm_up,
                var_update_scaler=settings.warm_up,
                local_step_scaler=settings.steps // 4,
                local_step_clipper=4,
                **common,
            )
        return torch.optim.AdamW(parameters, weight_decay=0.0, **common)

    def bar(self, settings: CompressedSettings) -> float:
        """How many times fewer bytes than the uncompressed way must cross between nodes."""
        return settings.zeropp_bar if self.stage == 3 else settings.one_bit_bar


ZEROPP = {"quantized_weights": "int8", "quantized_gradients": "int4", "hierarchical_partition": True}

MODES = {
    "adam": TrainingMode("Adam", "adam", 0, {}),
    "onebit_adam": TrainingMode("1-bit Adam", "onebit", 0, {}, "adam"),
    "zero_one_adam": TrainingMode("0/1 Adam", "zero_one", 0, {}, "adam"),
    "zero3": TrainingMode("ZeRO-3", "adam", 3, {}),
    "zeropp": TrainingMode("ZeRO++", "adam", 3, ZEROPP, "zero3"),
}
