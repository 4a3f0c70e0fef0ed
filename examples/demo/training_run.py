"""Losses of the full training run over both world sizes, and its checks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from demo.record import mean_losses, read_records
from demo.settings import SETTINGS


@dataclass(frozen=True)
class TrainingRun:
    """Losses in nats per byte, from the records of the two runs."""

    parameters: int
    losses: list[float]  # one per step, the mean over ranks
    held_out_start: float
    held_out_saved: float  # before the checkpoint, with the first world size
    held_out_resumed: float  # after loading it, with the second world size
    held_out_end: float
    unigram_entropy: float
    ranks: tuple[int, int]
    sample: str

    @staticmethod
    def read(folder: Path) -> TrainingRun:
        """Load and join the records of both runs."""
        first = read_records(folder, f"train-{SETTINGS.save_at}")
        second = read_records(folder, f"train-{SETTINGS.steps}")
        return TrainingRun(
            parameters=first[0]["parameters"],
            losses=mean_losses(first) + mean_losses(second),
            held_out_start=first[0]["held_out_before"],
            held_out_saved=first[0]["held_out_after"],
            held_out_resumed=second[0]["held_out_before"],
            held_out_end=second[0]["held_out_after"],
            unigram_entropy=first[0]["unigram_entropy"],
            ranks=(len(first), len(second)),
            sample=second[0]["sample"],
        )

    @property
    def bar(self) -> float:
        """Upper bound for the held-out loss at the end."""
        return min(self.unigram_entropy, SETTINGS.loss_bar * self.held_out_start)

    def failures(self) -> list[str]:
        """Return a message for each check that failed."""
        found = []
        if len(self.losses) != SETTINGS.steps:
            found.append(f"expected {SETTINGS.steps} steps, got {len(self.losses)}")
        if not self.held_out_end < self.unigram_entropy:
            found.append(
                f"held-out loss ended at {self.held_out_end:.3f}, not below the text's byte-unigram entropy "
                f"{self.unigram_entropy:.3f}"
            )
        if not self.held_out_end < SETTINGS.loss_bar * self.held_out_start:
            found.append(
                f"held-out loss ended at {self.held_out_end:.3f}, not below {SETTINGS.loss_bar:g} x its "
                f"start {self.held_out_start:.3f}"
            )
        moved = abs(self.held_out_resumed / self.held_out_saved - 1)
        if not moved <= SETTINGS.resume_tolerance:
            found.append(
                f"resuming on {self.ranks[1]} rank(s) moved the held-out loss from {self.held_out_saved:.5f} "
                f"to {self.held_out_resumed:.5f}, by more than {SETTINGS.resume_tolerance:g} (relative)"
            )
        return found
