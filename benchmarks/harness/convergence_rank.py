"""A rank that trains a byte model in one mode, a part of the run at a time; driven by a team."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zero_ext
from benchmarks.harness.compressed_modes import mode_named
from benchmarks.harness.text_model import mean_loss, text_run
from benchmarks.harness.token_bucket import slow_down
from benchmarks.harness.worker import main
from examples.demo.corpus import Corpus
from zero_ext.zero import engine_of

COMMANDS = ("start", "train", "held_out", "save")


class ConvergenceRank:
    """State of this process: a prepared model, and how many steps it has made."""

    def start(
        self, what: str, mode: str, seed: int, dtype: str, steps: int, text: str, folder: str
    ) -> dict[str, Any] | None:
        """Joins the others, reads the corpus in `text`, and goes on from the newest checkpoint in `folder`:
        returns what `save` was given with it, None at the beginning."""
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self.rank, self.ranks, self.seed = dist.get_rank(), dist.get_world_size(), seed
        self.run, compressed_mode = dataclasses.replace(text_run(what), steps=steps), mode_named(mode)
        self.base_rate = self.run.learning_rate * compressed_mode.rate_factor
        model = self.run.model(seed)
        optimizer = compressed_mode.optimizer(model.parameters(), self.run, self.base_rate)
        config = {**compressed_mode.config, "precision": {"dtype": dtype}}
        self.model, self.optimizer = zero_ext.prepare(model, optimizer, config)
        self.engine = engine_of(self.model)
        self.engine.traffic.begin_step()  # what made the ranks alike is no step
        slow_down(self.engine.traffic)
        corpus = Corpus.read(Path(text))
        self.text, self.judged = corpus.training, self.run.held_out(corpus.held_out, self.rank, self.ranks)
        self.steps = 0
        self.folder = Path(folder)
        if not any(self.folder.glob("step-*")):
            return None
        loaded = zero_ext.load_checkpoint(self.folder, self.model)
        self.steps = loaded.step
        return dict(loaded.client_state)

    def train(self, until: int) -> dict[str, Any]:
        """Trains to step `until`; losses of this rank, bytes sent and crossing by kind, and seconds."""
        losses, sent, crossing = [], Counter[str](), Counter[str]()
        dist.barrier()
        began = time.perf_counter()
        while self.steps < until:
            for group in self.optimizer.param_groups:
                group["lr"] = self.base_rate * self.run.factor(self.steps)
            windows = self.run.windows(self.text, self.seed, self.steps, self.rank, self.ranks)
            loss = self.model(input_ids=windows, labels=windows).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.steps += 1
            losses.append(float(loss.detach()))
            sent.update(self.engine.traffic.last_bytes_sent)
            crossing.update(self.engine.traffic.last_crossing_bytes)
        dist.barrier()
        seconds = time.perf_counter() - began
        return {"losses": losses, "sent": sent, "crossing": crossing, "seconds": seconds}

    def held_out(self) -> float:
        """The held-out loss over all ranks' windows, in nats per byte."""
        loss = mean_loss(self.model, self.judged)
        dist.all_reduce(loss)
        return float(loss) / self.ranks

    def save(self, record: dict[str, Any]) -> None:
        """Saves what the next start goes on from, and `record` with it."""
        zero_ext.save_checkpoint(
            self.folder, self.model, step=self.steps, keep_last=1, client_state=record
        ).wait()


if __name__ == "__main__":
    main(ConvergenceRank(), COMMANDS)
