"""Training modes that the demonstration compares, each with an optimizer and a configuration."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import zero_ext
from demo_compressed.settings import CompressedSettings

BETAS = (0.9, 0.95)  # with 0.95, the large first gradients decay before the variance is frozen


@dataclass(frozen=True)
class TrainingMode:
    """Optimizer, ZeRO stage and communication settings of one mode.

    `against` names the uncompressed mode that this mode is compared with.
    """

    title: str
    optimizer: str
    stage: int
    communication: dict[str, Any]
    against: str | None = None

    def config(self, settings: CompressedSettings) -> dict[str, Any]:
        """Return the configuration for `zero_ext.prepare`."""
        nodes = {"ranks_per_node": settings.ranks_per_node}
        return {
            "stage": self.stage,
            "precision": {"dtype": "bf16"},
            "communication": {**nodes, **self.communication},
        }

    def build(
        self, parameters: Iterable[nn.Parameter], settings: CompressedSettings
    ) -> torch.optim.Optimizer:
        """Return the optimizer, constructed as in a user's script."""
        common = {"lr": settings.learning_rate, "betas": BETAS}
        if self.optimizer == "onebit":
            return zero_ext.OneBitAdam(parameters, freeze_step=settings.warm_up, **common)
        if self.optimizer == "zero_one":
            # The published policy updates the variance less and less often after 16 steps. It is meant for
            # runs hundreds of times as long and would leave too few updates here.
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
        """Return the factor by which the bytes between nodes must fall from the uncompressed mode."""
        return settings.zeropp_bar if self.stage == 3 else settings.one_bit_bar


ZEROPP = {"quantized_weights": "int8", "quantized_gradients": "int4", "hierarchical_partition": True}

MODES = {
    "adam": TrainingMode("Adam", "adam", 0, {}),
    "onebit_adam": TrainingMode("1-bit Adam", "onebit", 0, {}, "adam"),
    "zero_one_adam": TrainingMode("0/1 Adam", "zero_one", 0, {}, "adam"),
    "zero3": TrainingMode("ZeRO-3", "adam", 3, {}),
    "zeropp": TrainingMode("ZeRO++", "adam", 3, ZEROPP, "zero3"),
}
