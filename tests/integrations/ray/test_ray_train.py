"""A TorchTrainer on a local cluster: the losses of a plain loop, checkpoints kept by Ray, resuming."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.train import CheckpointConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from tests.integrations.ray.training import alone, local_cluster, on_workers
from zero_ext.checkpoint import inspect_checkpoint


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with local_cluster():
        yield


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
