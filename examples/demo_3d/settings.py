"""Settings of the demonstration, and the layouts that it compares."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class DemoLayout:
    """A layout of the ranks: the sizes of the mesh axes, and the zero_ext configuration."""

    title: str
    axes: dict[str, int]
    config: dict[str, Any] = field(default_factory=dict)


LAYOUTS = {
    "pp_dp": DemoLayout("2 stages × 2 replicas, ZeRO-2", {"pp": 2, "dp": 2}, {"stage": 2}),
    "pp_tp": DemoLayout("2 stages × 2-way tensor parallelism", {"pp": 2, "tp": 2}, {"stage": 0}),
    "tp_dp": DemoLayout(
        "2-way tensor parallelism × 2 replicas, ZeRO-3, state in host memory",
        {"tp": 2, "dp": 2},
        {"stage": 3, "offload": {"params": "host", "grads": "host", "optimizer": "host"}},
    ),
}
ALONE = "alone"


@dataclass(frozen=True)
class ThreeDSettings:
    """A byte-level transformer of about 0.8 million parameters, fp32, on four ranks.

    Attributes:
        batch: Windows of `window` bytes per step, over all replicas.
        micro_batches: Number of micro-batches of a replica's share of the batch.
        loss_tolerance: Allowed relative difference of a step's loss from that of one process, because fp32
            sums in another order round differently.
    """

    width: int = 128
    blocks: int = 4
    heads: int = 4
    window: int = 64
    ranks: int = 4
    steps: int = 60
    batch: int = 16
    micro_batches: int = 4
    learning_rate: float = 1e-3
    epsilon: float = 1e-8
    clipping: float = 1.0
    seed: int = 7
    loss_tolerance: float = 1e-3
