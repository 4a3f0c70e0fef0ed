"""Train a small GPT in a Ray TorchTrainer with ZeRO-3, on two local workers, and resume on one worker.

    python examples/ray_train.py            under three minutes on two cores
    python examples/ray_train.py --ci       a smaller model and less text, under 40 seconds

The script exits with status 1 if the loss does not fall far enough, or if the second run does not continue
from the checkpoint of the first.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

import ray
import ray.train
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, get_device
from small_gpt import SmallGPT, language_loss, text_windows

import zero_ext
from zero_ext.data import ShardedLoader
from zero_ext.integrations.ray import report, resume
from zero_ext.zero import engine_of

WINDOW = 128
FOLDER = Path("runs").resolve() / "ray-train"
# The preemption watcher and the metrics each start one more process per run, and one machine needs neither.
ONE_MACHINE = {
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.25",
    "OMP_NUM_THREADS": "1",
}


def train(settings: dict) -> None:
    """Train on one worker. Ray has started the process group, and ``prepare`` uses it."""
    torch.manual_seed(0)
    model = SmallGPT(settings["layers"], settings["width"], WINDOW)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    model, optimizer = zero_ext.prepare(
        model, optimizer, {"stage": 3, "gradient_clipping": 1.0}, device=get_device()
    )
    engine = engine_of(model)
    data, _ = text_windows(WINDOW, settings["ci"])
    batch = 16 // engine.world_size
    loader = ShardedLoader(data, batch, rank=engine.rank, world_size=engine.world_size, drop_last=True)
    resume(model, loader=loader)

    started, last = engine.steps, engine.steps + settings["steps"]
    while engine.steps < last:
        for batch in loader:
            loss = language_loss(model, batch["input_ids"].to(engine.device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if engine.steps % settings["save_every"] == 0 or engine.steps == last:
                report({"started": started, "step": engine.steps, "loss": loss.item()}, model, loader=loader)
            if engine.steps == last:
                break


def run(workers: int, settings: dict) -> dict:
    trainer = TorchTrainer(
        train,
        train_loop_config=settings,
        torch_config=TorchConfig(backend="gloo"),  # omit on GPUs, where Ray uses NCCL
        scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(name="gpt", storage_path=str(FOLDER)),
    )
    metrics = trainer.fit().metrics
    print(f"{workers} worker(s): step {metrics['started']} to {metrics['step']}, loss {metrics['loss']:.3f}")
    return metrics


def main(ci: bool) -> int:
    shutil.rmtree(FOLDER, ignore_errors=True)
    examples = Path(__file__).resolve().parent
    paths = [str(examples), str(examples.parent), os.environ.get("PYTHONPATH", "")]
    # The cluster's processes inherit variables that are set before it starts. A runtime_env would start new
    # workers.
    os.environ.update(ONE_MACHINE, PYTHONPATH=os.pathsep.join(path for path in paths if path))
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 << 20,
        logging_level="WARNING",
        log_to_driver=False,
    )
    small = {"layers": 2, "width": 64, "steps": 40, "save_every": 20, "ci": True}
    settings = small if ci else {"layers": 4, "width": 128, "steps": 200, "save_every": 50, "ci": False}
    first = run(2, settings)
    second = run(1, {**settings, "steps": settings["steps"] // 2})
    ray.shutdown()
    enough = 3.6 if ci else 2.8
    return 0 if second["started"] == first["step"] and second["loss"] < enough else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ci", action="store_true", help="train a smaller model on less text, under 40 s")
    sys.exit(main(parser.parse_args().ci))
