"""Train in each layout in turn, or in one process as the reference.

Layouts: `torchrun --nproc-per-node 4 -m demo_3d.train FOLDER`. Reference: `python -m demo_3d.train FOLDER`.
"""

from __future__ import annotations

import gc
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from demo.corpus import Corpus
from demo.folder import read_settings
from demo.record import write_record

from zero_ext.parallel import make_mesh
from zero_ext.zero import engine_of

from .settings import ALONE, LAYOUTS, ThreeDSettings
from .steps import ManyRanks, OneProcess, batches


def timed(
    trained: OneProcess | ManyRanks, settings: ThreeDSettings, corpus: Corpus, title: str
) -> dict[str, Any]:
    """Run all steps and return the loss and the seconds of each."""
    losses, seconds = [], []
    for step, (windows, following) in enumerate(batches(settings, corpus.training)):
        began = time.perf_counter()
        losses.append(trained.step(windows, following).loss)
        seconds.append(time.perf_counter() - began)
        if title and (step + 1) % 20 == 0:
            print(f"  {title}: step {step + 1}, loss {losses[-1]:.3f}", flush=True)
    return {"losses": losses, "seconds": seconds}


def train(name: str, settings: ThreeDSettings, corpus: Corpus) -> dict[str, Any]:
    """Run the steps in the layout called `name` and return the record of this rank."""
    layout = LAYOUTS[name]
    mesh = make_mesh(layout.axes)
    trained = ManyRanks(settings, mesh, layout.config)
    record = timed(trained, settings, corpus, "" if dist.get_rank() else layout.title)
    engine = engine_of(trained.model)
    record["coordinate"] = dict(zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), strict=True))
    record["parameters"] = sum(parameter.numel() for parameter in trained.model.parameters())
    record["state_bytes"] = sum(engine.memory_breakdown().values())
    record["sent"] = dict(engine.traffic.last_bytes_sent)
    record["slots"] = [asdict(slot) for slot in trained.pipeline.slots]
    return record


def main(folder: Path) -> None:
    """Train in every layout, or in the plain loop without torchrun, and write one record per layout."""
    settings, corpus = read_settings(ThreeDSettings, folder), Corpus.read(folder)
    if not dist.is_torchelastic_launched():
        write_record(folder, ALONE, 0, timed(OneProcess(settings), settings, corpus, ""))
        return
    dist.init_process_group("gloo")
    for name in LAYOUTS:
        record = train(name, settings, corpus)
        gc.collect()
        write_record(folder, name, dist.get_rank(), record)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
