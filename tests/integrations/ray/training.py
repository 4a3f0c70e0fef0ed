"""The loop that the workers of the tests run, and the same loop on one process without Ray."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist

import zero_ext
from tests.zero.models import TinyModel, language_batch, language_loss
from zero_ext.integrations.ray import report, resume
from zero_ext.zero import engine_of

ROOT = Path(__file__).resolve().parents[3]
SAMPLES = 4  # of a step, over all workers


@contextmanager
def local_cluster() -> Iterator[None]:
    """Two processors on this machine."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(path for path in paths if path), "OMP_NUM_THREADS": "1"}
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=80 << 20,
        runtime_env={"env_vars": variables},
        logging_level="ERROR",
        log_to_driver=False,
    )
    yield
    ray.shutdown()


def build(seed: int) -> tuple[Any, Any, Any]:
    torch.manual_seed(seed)
    model = TinyModel(tied=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)


def on_workers(settings: dict[str, Any]) -> None:
    """Trains under ZeRO, reports the losses of all steps so far, with a checkpoint, after every second."""
    model, optimizer, schedule = build(settings["seed"])
    model, optimizer = zero_ext.prepare(model, optimizer, {"stage": settings["stage"]})
    engine = engine_of(model)
    loaded = resume(model, scheduler=schedule)
    losses: list[float] = loaded.client_state["losses"] if loaded is not None else []
    started = engine.steps
    while engine.steps < settings["steps"]:
        share = SAMPLES // engine.world_size
        ids = language_batch(settings["seed"], engine.steps, 0, 0, SAMPLES)
        loss = language_loss(model, ids[engine.rank * share : (engine.rank + 1) * share])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        mean = loss.detach() / engine.world_size
        if dist.is_initialized():
            dist.all_reduce(mean)
        losses.append(mean.item())
        if engine.steps % 2 == 0:
            metrics = {"losses": losses, "started": started, "workers": engine.world_size}
            report(metrics, model, scheduler=schedule, client_state={"losses": losses})


def alone(seed: int, steps: int) -> list[float]:
    """The losses of the same training by torch alone."""
    model, optimizer, schedule = build(seed)
    losses = []
    for step in range(steps):
        loss = language_loss(model, language_batch(seed, step, 0, 0, SAMPLES))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return losses
