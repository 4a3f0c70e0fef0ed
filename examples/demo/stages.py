"""Run the same steps with each ZeRO stage in turn.

Command: `torchrun --nproc-per-node 2 -m demo.stages FOLDER`
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import zero_ext
from demo.corpus import ByteWindows, Corpus
from demo.language_model import build_model, build_optimizer
from demo.record import write_record
from demo.settings import SETTINGS
from zero_ext.data import ShardedLoader
from zero_ext.zero import engine_of

STATE_KINDS = ("params", "grads", "optimizer")


def run_stage(stage: int, windows: ByteWindows) -> dict[str, Any]:
    """Train `compared_steps` steps from the common start and return the record of this rank."""
    model = build_model(SETTINGS)
    optimizer = build_optimizer(model.parameters(), SETTINGS)
    config = {"stage": stage, "precision": {"dtype": "bf16"}, "gradient_clipping": SETTINGS.clip}
    model, optimizer = zero_ext.prepare(model, optimizer, config)
    engine = engine_of(model)
    ranks = engine.world_size
    loader = ShardedLoader(
        windows, SETTINGS.global_batch // ranks, rank=engine.rank, world_size=ranks, seed=SETTINGS.seed
    )
    losses, seconds = [], []
    for _, batch in zip(range(SETTINGS.compared_steps), loader, strict=False):
        began = time.perf_counter()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
        losses.append(loss.item())
    breakdown = engine.memory_breakdown()
    return {
        "stage": stage,
        "rank": engine.rank,
        "ranks": ranks,
        "losses": losses,
        "seconds": statistics.median(seconds[1:]),
        "bytes": {kind: breakdown[kind] for kind in STATE_KINDS},
        "collective_elements": dict(engine.traffic.last_elements),
        "sent_bytes": dict(engine.traffic.last_bytes_sent),
    }


def main(folder: Path) -> None:
    windows = ByteWindows(Corpus.read(folder).training, SETTINGS.window)
    for stage in range(4):
        record = run_stage(stage, windows)
        gc.collect()
        write_record(folder, f"stage-{stage}", record["rank"], record)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
