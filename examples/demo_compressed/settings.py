"""Every number of the demonstration in one place."""

from __future__ import annotations

from dataclasses import dataclass

from demo.settings import ModelShape


@dataclass(frozen=True)
class CompressedSettings(ModelShape):
    """A byte-level Llama of about 1.5 million parameters on four ranks, two on each of two simulated nodes.

    Attributes:
        steps, warm_up: optimizer steps of every way, and how many of them the one-bit ways send in full.
        batch: windows of a rank and step.
        held_out_every: steps between two points of the held-out curve, over `held_out_windows` windows.
        loss_tolerance: part by which a compressed way's held-out loss may end above its uncompressed one's:
            wide, as in so short a run gradients still change when the variance is frozen.
        one_bit_bar, zeropp_bar: how many times fewer bytes must cross between nodes after the warm-up.
    """

    hidden_size: int = 192
    layers: int = 3
    feed_forward_size: int = 512
    heads: int = 3
    window: int = 96
    ranks: int = 4
    ranks_per_node: int = 2
    steps: int = 240
    warm_up: int = 96
    batch: int = 2
    learning_rate: float = 3e-3
    held_out_every: int = 24
    held_out_windows: int = 32
    loss_tolerance: float = 0.1
    one_bit_bar: float = 15.0
    zeropp_bar: float = 3.5

    def factor(self, step: int) -> float:
        """Of the learning rate at a step from 0: a linear rise, then a straight fall to a fifth."""
        return min((step + 1) / 24, 1 - 0.8 * step / self.steps)
