"""Train in each mode in turn.

Command: `torchrun --nproc-per-node 4 -m demo_compressed.train FOLDER`
"""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from demo.corpus import ByteWindows, Corpus
from demo.folder import read_settings
from demo.language_model import build_model, held_out_loss
from demo.record import write_record

import zero_ext
from demo_compressed.modes import MODES
from demo_compressed.settings import CompressedSettings
from zero_ext.data import ShardedLoader
from zero_ext.zero import engine_of


def train(name: str, settings: CompressedSettings, corpus: Corpus) -> dict[str, Any]:
    """Train in the mode called `name` from the common start and return the record of this rank."""
    mode = MODES[name]
    model = build_model(settings)
    optimizer = mode.build(model.parameters(), settings)
    model, optimizer = zero_ext.prepare(model, optimizer, mode.config(settings))
    engine = engine_of(model)
    rank, ranks = engine.rank, engine.world_size
    windows = ByteWindows(corpus.training, settings.window)
    loader = ShardedLoader(windows, settings.batch, rank=rank, world_size=ranks, seed=settings.seed)
    judged = (
        ByteWindows(corpus.held_out, settings.window).spread(settings.held_out_windows).chunk(ranks)[rank]
    )
    record: dict[str, Any] = {"losses": [], "seconds": [], "sent": [], "crossing": []}
    engine.traffic.begin_step()  # discard the traffic of the initial synchronization
    record["held_out"] = [(0, _judge(model, judged))]
    for step, batch in zip(range(settings.steps), loader, strict=False):
        began = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * settings.factor(step)
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        record["losses"].append(loss.item())
        record["seconds"].append(time.perf_counter() - began)
        record["sent"].append(sum(engine.traffic.last_bytes_sent.values()))
        record["crossing"].append(sum(engine.traffic.last_crossing_bytes.values()))
        if (step + 1) % settings.held_out_every == 0:
            record["held_out"].append((step + 1, _judge(model, judged)))
            if rank == 0:
                said = f"  {mode.title}, step {step + 1}: held-out loss {record['held_out'][-1][1]:.3f}"
                print(said, flush=True)
    record["kinds"] = dict(engine.traffic.last_crossing_bytes)
    return record


def _judge(model: torch.nn.Module, windows: torch.Tensor) -> float:
    """Return the held-out loss over the windows of all ranks."""
    loss = torch.tensor(held_out_loss(model, windows), dtype=torch.float64)
    dist.all_reduce(loss)
    return float(loss) / dist.get_world_size()


def main(folder: Path) -> None:
    """Train in every mode and write one record per mode."""
    settings, corpus = read_settings(CompressedSettings, folder), Corpus.read(folder)
    dist.init_process_group("gloo")
    for name in MODES:
        record = train(name, settings, corpus)
        gc.collect()
        write_record(folder, name, dist.get_rank(), record)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
