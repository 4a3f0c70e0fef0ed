"""Train to a given step with ZeRO-3 on any number of ranks, from the newest checkpoint if there is one.

Command: `torchrun --nproc-per-node 2 -m demo.train FOLDER UNTIL [sample]`
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zero_ext
from demo.corpus import ByteWindows, Corpus, unigram_entropy
from demo.language_model import build_model, build_optimizer, build_schedule, held_out_loss, sample_text
from demo.record import write_record
from demo.settings import SETTINGS
from zero_ext.data import ShardedLoader
from zero_ext.monitor import CsvFile, ProgressLine
from zero_ext.zero import engine_of

CONFIG = {"stage": 3, "precision": {"dtype": "bf16"}, "gradient_clipping": SETTINGS.clip}


class Trainer:
    """Model, optimizer, schedule and data, with the newest checkpoint loaded."""

    def __init__(self, folder: Path) -> None:
        corpus = Corpus.read(folder)
        self.folder = folder
        self.checkpoints = folder / "checkpoints"
        self.held_out = ByteWindows(corpus.held_out, SETTINGS.window).spread(SETTINGS.held_out_windows)
        model = build_model(SETTINGS)
        optimizer = build_optimizer(model.parameters(), SETTINGS)
        self.model, self.optimizer = zero_ext.prepare(model, optimizer, CONFIG)
        self.schedule = build_schedule(self.optimizer, SETTINGS)
        self.engine = engine_of(self.model)
        self.loader = ShardedLoader(
            ByteWindows(corpus.training, SETTINGS.window),
            SETTINGS.global_batch // self.engine.world_size,
            rank=self.engine.rank,
            world_size=self.engine.world_size,
            seed=SETTINGS.seed,
        )
        self.step = self._resume() if self.checkpoints.exists() else 0

    def run(self, until: int) -> list[float]:
        """Train to step `until` and return this rank's loss of each step."""
        losses: list[float] = []
        batches = iter(self.loader)
        with self._progress() as show_loss:
            while self.step < until:
                loss = self.model(**next(batches)).loss
                loss.backward()
                show_loss(loss.item())
                losses.append(loss.item())
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.schedule.step()
                self.step += 1
        return losses

    def save(self) -> None:
        """Save a checkpoint from which a run with any number of ranks can resume."""
        zero_ext.save_checkpoint(self.checkpoints, self.model, scheduler=self.schedule, loader=self.loader)

    def _resume(self) -> int:
        return zero_ext.load_checkpoint(
            self.checkpoints, self.model, scheduler=self.schedule, loader=self.loader
        ).step

    @contextlib.contextmanager
    def _progress(self) -> Iterator[Any]:
        """Show a progress line and write a CSV file on rank 0, and yield the function that shows a loss."""
        if self.engine.rank != 0:
            yield lambda loss: None
            return
        title = f"ZeRO-3, {self.engine.world_size} rank{'s' * (self.engine.world_size > 1)}"
        line = ProgressLine(
            SETTINGS.steps, tokens_per_step=SETTINGS.tokens_per_step, title=title, first_step=self.step
        )
        with line, CsvFile(self.folder / "steps.csv") as rows:
            self.engine.subscribe(line)
            self.engine.subscribe(rows)
            yield line.show_loss


def main(folder: Path, until: int, sample: bool) -> None:
    """Train to step `until`, measure the held-out loss before and after, and save checkpoint and record."""
    trainer = Trainer(folder)
    first_step = trainer.step
    before = held_out_loss(trainer.model, trainer.held_out)
    losses = trainer.run(until)
    after = held_out_loss(trainer.model, trainer.held_out)
    trainer.save()
    text = sample_text(trainer.model.module, SETTINGS) if sample else None
    record = {
        "ranks": trainer.engine.world_size,
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "unigram_entropy": unigram_entropy(trainer.held_out),
        "first_step": first_step,
        "losses": losses,
        "held_out_before": before,
        "held_out_after": after,
        "sample": text,
    }
    write_record(folder, f"train-{until}", trainer.engine.rank, record)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), "sample" in sys.argv[3:])
