"""Settings of the demonstration."""

from __future__ import annotations

from dataclasses import dataclass

from demo.settings import ModelShape

BYTES = 256  # the vocabulary


@dataclass(frozen=True)
class OffloadSettings(ModelShape):
    """A byte-level Llama of about 100 million parameters, trained on one window per step.

    Attributes:
        steps: Optimizer steps per run.
        staging_buffer_bytes: Staging memory for optimizer state that is stored on NVMe.
        cap_bytes_per_parameter: The memory cap per parameter, not counting the interpreter and its libraries.
            Training in bf16 with Adam needs 16 bytes per parameter, and the bf16 weights alone need 2.
        sample_seconds: Time between two points of the memory timeline.
        time_limit_seconds: A run that takes longer is killed, and the demonstration fails.
    """

    hidden_size: int = 1024
    layers: int = 8
    feed_forward_size: int = 2816
    heads: int = 16
    steps: int = 6
    learning_rate: float = 1e-4
    staging_buffer_bytes: int = 32 * 2**20
    cap_bytes_per_parameter: int = 5
    sample_seconds: float = 0.05
    time_limit_seconds: float = 240.0

    @property
    def parameters(self) -> int:
        """Number of parameters of the model."""
        hidden = self.hidden_size
        layer = 4 * hidden**2 + 3 * hidden * self.feed_forward_size + 2 * hidden
        return 2 * BYTES * hidden + self.layers * layer + hidden
