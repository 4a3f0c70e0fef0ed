"""Settings of the demonstration."""

from __future__ import annotations

from dataclasses import dataclass

from demo.settings import ModelShape


@dataclass(frozen=True)
class CompressedSettings(ModelShape):
    """A byte-level Llama of about 1.5 million parameters on four ranks, two on each of two simulated nodes.

    Attributes:
        steps: Optimizer steps of every mode.
        warm_up: Steps at the start that the 1-bit modes send in full precision.
        batch: Windows per rank and step.
        held_out_every: Steps between two points of the held-out curve.
        held_out_windows: Windows for the held-out loss, over all ranks.
        loss_tolerance: Allowed relative excess of the held-out loss over that of the uncompressed mode. It is
            large because gradients of such a short run still change when the variance is frozen.
        one_bit_bar, zeropp_bar: Required reduction of the bytes between nodes after the warm-up.
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
        """Return the learning rate factor of a step (from 0): linear warm-up, then linear decay to 0.2."""
        return min((step + 1) / 24, 1 - 0.8 * step / self.steps)
