"""Where the state of a model too large for the device goes, and the bytes that takes, predicted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.gpu.gpt import GPT, LOSS_CHUNK, GPTShape
from benchmarks.gpu.trainers import configuration
from benchmarks.peers.base import BETAS, EPSILON, LEARNING_RATE, WEIGHT_DECAY
from zero_ext.plan import model_staging

STATE_BYTES = {"bf16": 8.0, "8bit": 4 + 2 * (1 + 4 / 256)}  # masters and moments of a parameter
# What stays free of the cap and of the machine's memory.
DEVICE_SHARE, HOST_SHARE, DISK_SHARE = 0.94, 0.93, 0.9
WIDTHS_OF_A_BLOCK, BYTES_OF_A_LOGIT = 26, 12
SHARE_FOR_STATE = 0.7  # of the cap, where part of the optimizer stays on the device
GRADIENT_BYTES = 2  # of a parameter whose optimizer stays there: its gradient is kept


@dataclass(frozen=True)
class Placement:
    """A configuration and the bytes that it is predicted to take in every tier.

    Attributes:
        name: in words.
        moments: dtype of Adam's moments.
        offload: section of the configuration.
        device, host, nvme: bytes of state and staging, on the device with activations of one sequence.
        activations: bytes of one sequence's activations, of that.
    """

    name: str
    moments: str
    offload: dict[str, Any]
    device: int = 0
    host: int = 0
    nvme: int = 0
    activations: int = 0

    def configuration(self) -> dict[str, Any]:
        """For `prepare`: no clipping, so a unit's gradient is used up by its update inside backward."""
        return configuration(3, 0.0, self.moments, {**self.offload, "update_mode": "in_backward"})

    def fits(self, cap: int, host: int, disk: int) -> bool:
        """Whether the predicted bytes leave a little of every tier."""
        return (
            self.device <= DEVICE_SHARE * cap
            and self.host <= HOST_SHARE * host
            and self.nvme <= DISK_SHARE * disk
        )

    def sequences(self, cap: int, most: int) -> int:
        """Sequences of a batch that fit under `cap`, at most `most`."""
        free = DEVICE_SHARE * cap - self.device + self.activations
        return max(1, min(most, int(free / self.activations)))

    def text(self) -> str:
        """The sizes, for people."""
        sizes = ", ".join(
            f"{tier} {getattr(self, tier) / 2**30:.1f} GiB" for tier in ("device", "host", "nvme")
        )
        return f"{self.name}: {sizes} predicted"


def choices(shape: GPTShape, cap: int, moments: str = "") -> list[Placement]:
    """Placements from the quickest to the most frugal, with predicted bytes; of `moments` only, if given."""
    state_bytes = (STATE_BYTES["8bit"] + GRADIENT_BYTES) * shape.parameters
    ratio = 1.0 - min(0.9, SHARE_FOR_STATE * cap / state_bytes)
    host = {"params": "host", "optimizer": "host"}
    found = [
        Placement("optimizer on the host, bf16 moments", "bf16", {"optimizer": "host"}),
        Placement("parameters and optimizer on the host, bf16 moments", "bf16", host),
        Placement("parameters and optimizer on the host, 8-bit moments", "8bit", host),
        Placement(
            "parameters and part of the optimizer on the host, 8-bit moments",
            "8bit",
            {**host, "ratio": ratio},
        ),
        Placement(
            "parameters on NVMe, optimizer on the host, 8-bit moments",
            "8bit",
            {"params": "nvme", "optimizer": "host"},
        ),
        Placement(
            "parameters on the host, optimizer on NVMe, 8-bit moments",
            "8bit",
            {"params": "host", "optimizer": "nvme"},
        ),
    ]
    return [predicted(each, shape) for each in found if moments in ("", each.moments)]


def predicted(placement: Placement, shape: GPTShape) -> Placement:
    """The same with its bytes: state by formula, staging as `prepare` plans it, activations estimated."""
    with torch.device("meta"):
        model = GPT(shape, checkpointing=True)
    staging = model_staging(model, optimizer_of(model), placement.configuration(), 1)
    tier, ratio = placement.offload["optimizer"], placement.offload.get("ratio", 1.0)
    state = STATE_BYTES[placement.moments] * shape.parameters
    params = 2 * shape.parameters
    bytes_of = {"device": float(staging.pool.nbytes), "host": float(staging.host), "nvme": 0.0}
    bytes_of[tier] += ratio * state
    if ratio < 1:
        # Units are not split: up to one more stays.
        stays = (1 - ratio) * shape.parameters + shape.block_parameters
        bytes_of["device"] += stays * (STATE_BYTES[placement.moments] + GRADIENT_BYTES)
    bytes_of[placement.offload.get("params", "device")] += params
    activations, logits = activation_bytes(shape)
    bytes_of["device"] += activations + logits
    return replace(
        placement,
        device=int(bytes_of["device"]),
        host=int(bytes_of["host"]),
        nvme=int(bytes_of["nvme"]),
        activations=activations,
    )


def activation_bytes(shape: GPTShape) -> tuple[int, int]:
    """An estimate (for each sequence, for any number of them): a checkpoint a block and one block computed
    again, with its gradients; the logits of one chunk of the loss, in both precisions, and theirs."""
    each = 2 * shape.positions * shape.hidden * (shape.layers + WIDTHS_OF_A_BLOCK)
    return each, LOSS_CHUNK * shape.vocabulary * BYTES_OF_A_LOGIT


def optimizer_of(model: GPT) -> torch.optim.AdamW:
    """AdamW with the shared hyper-parameters, for parameters on the meta device too."""
    return torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY
    )


def deepest_predicted(
    few: Placement, many: Placement, depths: tuple[int, int], cap: int, host: int, disk: int
) -> int:
    """The depth at which the first tier is full, of a placement predicted at two depths; 0 if none fits."""
    budgets = {"device": DEVICE_SHARE * cap, "host": HOST_SHARE * host, "nvme": DISK_SHARE * disk}
    limits = []
    for tier, budget in budgets.items():
        low, high = getattr(few, tier), getattr(many, tier)
        slope = (high - low) / (depths[1] - depths[0])
        if slope > 0:
            limits.append(depths[0] + (budget - low) / slope)
        elif low > budget:
            limits.append(0.0)
    return max(0, int(min(limits)))
