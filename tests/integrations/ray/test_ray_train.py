"""A TorchTrainer on a local cluster: the losses of a plain loop, checkpoints kept by Ray, resuming."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.train
from ray.train import CheckpointConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from tests.integrations.ray.training import alone, on_workers
from zero_ext.checkpoint import inspect_checkpoint

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Two processors on this machine."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": os.pathsep.join(path for path in paths if path), "OMP_NUM_THREADS": "1"}
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=80 << 20,
        runtime_env={"env_vars": environment},
        logging_level="ERROR",
        log_to_driver=False,
    )
    yield
    ray.shutdown()


def run(folder: Path, workers: int, settings: dict[str, Any]) -> Any:
    trainer = TorchTrainer(
        on_workers,
        train_loop_config=settings,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(
            name="run", storage_path=str(folder), checkpoint_config=CheckpointConfig(num_to_keep=2)
        ),
    )
    return trainer.fit()


def test_two_workers_train_as_one_process_and_one_goes_on(cluster: None, tmp_path: Path) -> None:
    seed = secrets.randbelow(1 << 30)
    print(f"seed {seed}")
    wanted = alone(seed, 10)
    first = run(tmp_path, 2, {"seed": seed, "stage": 3, "steps": 6})
    assert first.metrics["workers"] == 2 and first.metrics["started"] == 0
    assert first.metrics["losses"] == pytest.approx(wanted[:6], rel=1e-5)
    # Written in place by both, and the oldest of three removed by Ray.
    folders = sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*"))
    assert folders == ["checkpoint-000004", "checkpoint-000006"]
    assert Path(first.checkpoint.path) == tmp_path / "run" / folders[-1]
    found = inspect_checkpoint(first.checkpoint.path)
    assert found.world_size == 2 and not found.damage

    second = run(tmp_path, 1, {"seed": seed, "stage": 1, "steps": 10})
    assert second.metrics["workers"] == 1 and second.metrics["started"] == 6
    assert second.metrics["losses"] == pytest.approx(wanted, rel=1e-5)
