"""Every number of the demonstration in one place."""

from __future__ import annotations

from dataclasses import dataclass

from demo.settings import ModelShape

BYTES = 256  # the vocabulary


@dataclass(frozen=True)
class OffloadSettings(ModelShape):
    """A byte-level Llama of about 100 million parameters, one window a step.

    Attributes:
        steps: optimizer steps of every run that gets so far.
        staging_buffer_bytes: memory through which the optimizer state on NVMe streams.
        cap_bytes_per_parameter: the cap is what the interpreter and its libraries take, plus this much for
            every parameter. Training in bf16 with Adam needs 16; the bf16 weights alone are 2.
        sample_seconds: time between two points of the memory timeline.
        time_limit_seconds: a run that takes longer is ended, and the demonstration has failed.
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
