"""Every number of the demonstration in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """What a byte-level Llama is built from; `window` is the bytes of text it sees at once."""

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
        global_batch: windows of `window` bytes in a step, whatever the number of ranks.
        steps, save_at: steps of the whole run, and the step at which it changes its world size.
        held_out_windows: windows that the held-out loss is taken over.
        compared_steps: steps that every stage and the plain loop repeat.
        loss_bar: the held-out loss must end below this fraction of its start.
        resume_tolerance: relative change of the held-out loss that a resume at another world size may cause.
        plain_tolerance: relative difference allowed between the plain loop's losses and ZeRO's: torch's
            AdamW and the one-pass step differ in the last bit of fp32, which turns the rounding of a few
            weights to bf16.
        memory_tolerance: relative difference allowed between measured bytes and the formula.
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
        """Bytes of text in one step, over all ranks."""
        return self.global_batch * self.window


SETTINGS = Settings()
