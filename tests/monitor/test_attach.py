"""Monitors by configuration: what is opened where, and what is refused before training."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_ext
from tests.monitor.watched import prepared, train
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.config import MonitorConfig
from zero_ext.monitor import attach, monitor_of
from zero_ext.zero import engine_of


@on_ranks(1, 2)
def test_who_writes_what(world: World) -> None:
    # One folder on all ranks.
    name = world.everyone(tempfile.mkdtemp() if world.rank == 0 else "")[0]
    folder = Path(name)
    try:
        monitor = {
            "output_dir": f"{folder}/run",
            "csv": f"{folder}/else/where.csv",
            "comms": True,
            "flops": {"peak": 1e12},
            "trace": {"first_step": 1, "steps": 2},
            "progress": {"steps": 4},
            "log_interval": 2,
        }
        model, optimizer = prepared(world, 3, monitor=monitor, steps_per_print=2)
        printed = io.StringIO()
        with contextlib.redirect_stderr(printed):
            train(world, model, optimizer, 4)
        lines = printed.getvalue().splitlines()
        assert len(lines) == (2 if world.rank == 0 else 0)
        assert all("loss " in line and "forward " in line and "device " in line for line in lines)
        assert all("mfu " in line for line in lines)
        found = monitor_of(model)
        assert found is not None  # every rank has its trace
        found.close()
        assert monitor_of(model) is None
        world.everyone(0)
        if world.rank == 0:
            files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
            traces = {f"run/trace-rank{rank}.json" for rank in range(world.size)}
            assert files == {"run/steps.jsonl", "else/where.csv", "run/comms.jsonl"} | traces
            rows = [json.loads(line) for line in (folder / "run/steps.jsonl").read_text().splitlines()]
            assert [row["step"] for row in rows] == [2, 4]
            assert all(row["loss"] > 0 and row["flops/mfu"] > 0 for row in rows)
        world.everyone(0)
    finally:
        if world.rank == 0:
            shutil.rmtree(folder)


@on_ranks(2)
def test_initialize_writes_too_and_without_the_section_nothing_listens(world: World) -> None:
    model: Any = nn.Linear(3, 1)
    quiet, _, _, _ = zero_ext.initialize(
        model=model, config={"train_batch_size": 4}, process_group=world.group
    )
    assert engine_of(quiet).subscribers == () and monitor_of(quiet) is None
    with tempfile.TemporaryDirectory() as folder:
        config = {
            "train_batch_size": 4,
            "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "job"},
        }
        engine, _, _, _ = zero_ext.initialize(model=nn.Linear(3, 1), config=config, process_group=world.group)
        losses = []
        for _ in range(2):
            loss = engine(torch.ones(2, 3)).square().mean()
            losses.append(repr(float(loss)))
            engine.backward(loss)
            engine.step()
        path = Path(folder) / "job" / "steps.csv"
        assert path.exists() == (world.rank == 0)
        if world.rank == 0:
            assert [row.split(",")[1] for row in path.read_text().splitlines()[1:]] == losses


@pytest.mark.parametrize(
    ("package", "section"),
    [
        ("tensorboard", {"tensorboard": True}),
        ("wandb", {"wandb": {}}),
        ("matplotlib", {"trace": {"plot": True}}),
    ],
)
def test_a_missing_package_is_named_before_anything_changes(
    package: str, section: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == package else find(name, *more)
    )
    model = nn.Linear(3, 1)
    before = model.weight.data_ptr()
    with pytest.raises(
        ModuleNotFoundError, match=f"'{package}', which is not installed.* pip install {package}"
    ):
        zero_ext.prepare(model, None, {"monitor": {"output_dir": str(tmp_path), **section}})
    assert model.weight.data_ptr() == before and list(tmp_path.iterdir()) == []
    zero_ext.prepare(model, None)


@on_ranks(2)
def test_what_cannot_be_opened_ends_all_ranks(world: World) -> None:
    with tempfile.TemporaryDirectory() as folder:
        blocked = Path(folder) / "file"
        blocked.write_text("")
        with pytest.raises(RuntimeError) as caught:
            prepared(world, 2, monitor={"output_dir": str(blocked)})
        assert "opening the monitors failed on ranks [0]" in str(caught.value)
        assert ("file" in str(caught.value)) == (world.rank == 0)
        assert "Training did not begin" in str(caught.value)


@on_ranks(1, stand_in=True)
def test_everything_on_an_accelerator(world: World) -> None:
    with tempfile.TemporaryDirectory() as folder:
        monitor = {
            "output_dir": folder,
            "csv": True,
            "flops": {"peak": 1e12},
            "trace": {"first_step": 2, "steps": 1},
        }
        model, optimizer = prepared(world, 3, monitor=monitor, device="stand_in")
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)  # nothing is left out
            for step in range(3):
                train(world, model, optimizer, 1, first=step)
                torch.accelerator.synchronize()
            found = monitor_of(model)
            assert found is not None
            found.close()
        rows = [json.loads(line) for line in (Path(folder) / "steps.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == [1, 2, 3]
        for row in rows[:2]:
            assert row["loss"] > 0 and row["device/forward"] >= 0 and row["flops/step"] > 0
            assert 0 < row["memory/allocated"] <= row["memory/peak"]
        events = json.loads((Path(folder) / "trace-rank0.json").read_text())["traceEvents"]
        assert any("allocated on the device" in event["args"] for event in events)


def test_a_second_monitor_is_refused(tmp_path: Path) -> None:
    model, _ = zero_ext.prepare(nn.Linear(3, 1), None, {"monitor": {"output_dir": str(tmp_path)}})
    with pytest.raises(ValueError, match="model: expected no open monitor"):
        attach(model, MonitorConfig(output_dir=str(tmp_path)))
    first = monitor_of(model)
    assert first is not None
    first.close()
    assert attach(model, MonitorConfig(output_dir=str(tmp_path))) is monitor_of(model)


def test_the_signature_is_still_that_of_prepare() -> None:
    from inspect import signature

    from zero_ext.zero.api.prepare import prepare

    assert signature(zero_ext.prepare) == signature(prepare) and zero_ext.prepare.__doc__ == prepare.__doc__
