"""Trains in one layout after the other, in one process a rank; started by torchrun.

`torchrun --nproc-per-node 4 -m demo_3d.train FOLDER`; without torchrun, the process that they are held to.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from demo.corpus import ByteWindows, Corpus
from demo.record import write_record
from torch import Tensor, nn

import zero_ext
from demo_3d.model import layers, loss, score, split_tensors
from demo_3d.settings import ALONE, WAYS, ThreeDSettings
from zero_ext.parallel import make_mesh
from zero_ext.parallel.pipeline import Pipeline, PipelineModule, TiedLayerSpec
from zero_ext.zero import engine_of


def batches(settings: ThreeDSettings, corpus: Corpus) -> Iterator[tuple[Tensor, Tensor]]:
    """Of every step all windows [batch, window], and the bytes that follow."""
    text = ByteWindows(corpus.training, settings.window + 1)
    drawn = torch.Generator().manual_seed(settings.seed)
    for _ in range(settings.steps):
        chosen = torch.randint(len(text), (settings.batch,), generator=drawn)
        windows = torch.stack([text[int(place)]["input_ids"] for place in chosen])
        yield windows[:, :-1], windows[:, 1:]


def alone(settings: ThreeDSettings, corpus: Corpus) -> dict[str, Any]:
    """The plain loop in one process, without zero_ext's engine."""
    torch.manual_seed(settings.seed)
    specified = layers(settings)
    built = nn.ModuleList(_built(specified))
    optimizer = torch.optim.AdamW(built.parameters(), lr=settings.learning_rate)
    record: dict[str, Any] = {"losses": [], "seconds": []}
    for windows, following in batches(settings, corpus):
        began = time.perf_counter()
        hidden = windows
        for layer in built:
            hidden = layer(hidden)
        value = loss(score(built[0], hidden), following)
        value.backward()
        nn.utils.clip_grad_norm_(built.parameters(), settings.clipping)
        optimizer.step()
        optimizer.zero_grad()
        record["losses"].append(value.item())
        record["seconds"].append(time.perf_counter() - began)
    return record


def _built(specified: list[Any]) -> list[nn.Module]:
    """All layers but the last, which is the first one again, with the values a pipeline gives them."""
    kept = [each for each in specified if not isinstance(each, TiedLayerSpec) or each.forward is None]
    return [each.build(zero_ext.parallel.pipeline.layer_seed(number)) for number, each in enumerate(kept)]


def train(name: str, settings: ThreeDSettings, corpus: Corpus) -> dict[str, Any]:
    """The same steps in the layout called `name`; this rank's figures."""
    way = WAYS[name]
    mesh = make_mesh(way.axes)
    torch.manual_seed(settings.seed)
    module = PipelineModule(layers(settings), mesh, loss=loss)
    split_tensors(module, mesh)
    optimizer = torch.optim.AdamW(module.parameters(), lr=settings.learning_rate)
    config = {**way.config, "gradient_clipping": settings.clipping}
    model, optimizer = zero_ext.prepare(module, optimizer, config, process_group=mesh)
    pipeline = Pipeline(model, optimizer, micro_batches=settings.micro_batches)
    replicas = mesh["dp"]
    share = settings.batch // replicas.size()
    own = slice(share * replicas.get_local_rank(), share * (replicas.get_local_rank() + 1))
    record: dict[str, Any] = {"losses": [], "seconds": []}
    for step, (windows, following) in enumerate(batches(settings, corpus)):
        began = time.perf_counter()
        value = pipeline.train_batch(windows[own], targets=following[own])
        record["losses"].append(value.item())
        record["seconds"].append(time.perf_counter() - began)
        if dist.get_rank() == 0 and (step + 1) % 20 == 0:
            print(f"  {way.title}: step {step + 1}, loss {value.item():.3f}", flush=True)
    engine = engine_of(model)
    record["coordinate"] = dict(zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), strict=True))
    record["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    record["state_bytes"] = sum(engine.ledger().values())
    record["sent"] = dict(engine.wire.last_bytes_sent)
    record["slots"] = [asdict(slot) for slot in pipeline.slots]
    return record


def main(folder: Path) -> None:
    """Every layout, or the plain loop where torchrun has not started this; a record each."""
    settings, corpus = ThreeDSettings.read(folder), Corpus.read(folder)
    if not dist.is_torchelastic_launched():
        write_record(folder, ALONE, 0, alone(settings, corpus))
        return
    dist.init_process_group("gloo")
    for name in WAYS:
        record = train(name, settings, corpus)
        gc.collect()
        write_record(folder, name, dist.get_rank(), record)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
