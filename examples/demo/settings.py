"""Settings of the main demonstration."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """Shape of a byte-level Llama. `window` is its sequence length in bytes."""

    hidden_size: int = 640
    layers: int = 5
    feed_forward_size: int = 1728
    heads: int = 10
    window: int = 128
    seed: int = 0


@dataclass(frozen=True)
class Settings(ModelShape):
    """A byte-level Llama of about 25 million parameters, sized to learn within a minute on two cores.

    Attributes:
        global_batch: Windows of `window` bytes per step, over all ranks.
        steps, save_at: Steps of the full run, and the step at which the world size changes.
        held_out_windows: Windows for the held-out loss.
        compared_steps: Steps that every stage and the plain loop run.
        loss_bar: The held-out loss must end below this fraction of its start.
        resume_tolerance: Allowed relative change of the held-out loss after resuming at another world size.
        plain_tolerance: Allowed relative difference between the losses of the plain loop and of ZeRO. Torch's
            AdamW and the one-pass step differ in the last bit of fp32, which changes the rounding of a few
            weights to bf16.
        memory_tolerance: Allowed relative difference between measured bytes and the formula.
    """

    global_batch: int = 8
    steps: int = 80
    save_at: int = 60
    warmup_steps: int = 10
    learning_rate: float = 1e-3
    clip: float = 1.0
    held_out_windows: int = 64
    compared_steps: int = 6
    ranks: int = 2
    loss_bar: float = 0.6
    resume_tolerance: float = 2e-3
    plain_tolerance: float = 1e-3
    memory_tolerance: float = 0.03

    @property
    def tokens_per_step(self) -> int:
        """Bytes of text per step, over all ranks."""
        return self.global_batch * self.window


SETTINGS = Settings()
