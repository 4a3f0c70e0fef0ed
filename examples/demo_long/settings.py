"""Settings of the demonstration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from demo.settings import ModelShape


@dataclass(frozen=True)
class LongSettings(ModelShape):
    """A byte-level Llama of about 3 million parameters with a sequence length of 16,384 bytes.

    Attributes:
        steps: Optimizer steps, with one window per step.
        dense_steps: Steps with torch's flash kernel, which are run only to measure their time.
        held_out_windows: Windows for the held-out loss before and after training.
        block, num_local_blocks: Layout parameters of mode "fixed" with unidirectional attention.
        cap_bytes: The memory cap, not counting the interpreter and its libraries.
        loss_bar: Upper bound for the held-out loss at the end, in nats per byte.
        time_limit_seconds: A run that takes longer is killed, and the demonstration fails.
    """

    hidden_size: int = 256
    layers: int = 4
    feed_forward_size: int = 704
    heads: int = 4
    window: int = 16_384
    steps: int = 30
    dense_steps: int = 1
    held_out_windows: int = 2
    learning_rate: float = 3e-3
    block: int = 64
    num_local_blocks: int = 8
    cap_bytes: int = 3 * 2**30
    loss_bar: float = 3.2
    time_limit_seconds: float = 280.0

    @property
    def layout(self) -> dict[str, Any]:
        """The `sparse_attention` section of the configuration."""
        return {
            "mode": "fixed",
            "block": self.block,
            "num_local_blocks": self.num_local_blocks,
            "attention": "unidirectional",
        }
