"""Every number of the demonstration, and the layouts that it compares."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class DemoLayout:
    """A layout of the ranks: lengths of the mesh's axes, and ZeRO's configuration."""

    title: str
    axes: dict[str, int]
    config: dict[str, Any] = field(default_factory=dict)


LAYOUTS = {
    "pp_dp": DemoLayout("2 stages × 2 replicas, ZeRO-2", {"pp": 2, "dp": 2}, {"stage": 2}),
    "pp_tp": DemoLayout("2 stages × 2 parts of tensors", {"pp": 2, "tp": 2}, {"stage": 0}),
    "tp_dp": DemoLayout(
        "2 parts of tensors × 2 replicas, ZeRO-3, state in host memory",
        {"tp": 2, "dp": 2},
        {"stage": 3, "offload": {"params": "host", "grads": "host", "optimizer": "host"}},
    ),
}
ALONE = "alone"


@dataclass(frozen=True)
class ThreeDSettings:
    """A byte-level transformer of about 0.8 million parameters, fp32, on four ranks.

    Attributes:
        batch: windows of `window` bytes a step, over all ranks; a replica cuts its part into `micro_batches`.
        loss_tolerance: part by which a step's loss may differ from that of one process: in fp32 sums of other
            orders round otherwise.
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
