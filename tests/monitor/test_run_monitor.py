"""Rows from sources to writers, whatever fails; what a configuration opens where, and what it refuses."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import warnings
import weakref
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
from zero_ext.config.events import Event, StepEnd
from zero_ext.monitor import CsvFile, JsonLines, Monitor, StepTimes, attach, monitor_of, subscribe
from zero_ext.monitor.sources import Row
from zero_ext.zero import engine_of

ROOT = Path(__file__).parents[2]


class RecordingWriter:
    """A writer that keeps rows."""

    def __init__(self, fails_at: int = 0) -> None:
        self.rows: list[dict[str, Any]] = []
        self.closed = 0
        self._fails_at = fails_at

    def write(self, row: Row) -> None:
        if row["step"] == self._fails_at:
            raise OSError("No space left on device")
        self.rows.append(dict(row))

    def close(self) -> None:
        self.closed += 1


def small() -> tuple[Any, Any]:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    return zero_ext.prepare(model, torch.optim.SGD(model.parameters(), lr=0.25))


def step(model: Any, optimizer: Any) -> float:
    loss = model(torch.randn(2, 3)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def test_rows_hold_what_everybody_says() -> None:
    model, optimizer = small()
    every, second = RecordingWriter(), RecordingWriter()
    monitor = Monitor(engine_of(model), [every], [StepTimes()])
    seldom = Monitor(engine_of(model), [second], log_interval=2)
    for number in range(1, 6):
        monitor.log(loss=float(number), tokens=7)
        step(model, optimizer)
    assert [row["step"] for row in every.rows] == [1, 2, 3, 4, 5]
    assert [row["loss"] for row in every.rows] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert all(row["tokens"] == 7 and row["time/forward"] > 0 and row["lr"] == (0.25,) for row in every.rows)
    assert [(row["step"], row["loss"]) for row in second.rows] == [(2, None), (4, None)]
    assert "tokens" not in second.rows[0]
    monitor.close()
    monitor.close()
    step(model, optimizer)
    assert every.closed == 1 and len(every.rows) == 5
    seldom.close()
    assert engine_of(model).subscribers == ()


def test_a_failing_writer_is_left_out_and_said_once() -> None:
    model, optimizer = small()
    bad, good = RecordingWriter(fails_at=2), RecordingWriter()

    def broken(event: Event) -> None:
        raise ValueError("a subscriber's mistake")

    class Mistaken(StepTimes):
        def values(self, end: StepEnd) -> dict[str, Any]:
            raise KeyError("time/forward")

    monitor = Monitor(engine_of(model), [bad, good], [Mistaken()], [broken])
    with pytest.warns(RuntimeWarning) as said:
        for _ in range(4):
            step(model, optimizer)
    texts = [str(one.message) for one in said if "left out from now on" in str(one.message)]
    assert len(texts) == 3
    assert "function failed" in texts[0] and "ValueError: a subscriber's mistake" in texts[0]
    assert "Mistaken failed" in texts[1] and "KeyError: 'time/forward'" in texts[1]
    assert "RecordingWriter failed" in texts[2] and "OSError: No space left on device" in texts[2]
    assert [row["step"] for row in bad.rows] == [1]
    assert [row["step"] for row in good.rows] == [1, 2, 3, 4]
    monitor.close()


def test_the_model_is_referenced_weakly_and_its_end_closes_all(tmp_path: Path) -> None:
    model, optimizer = small()
    records = RecordingWriter()
    monitor = Monitor(engine_of(model), [records], [StepTimes()], [CsvFile(tmp_path / "steps.csv")])
    assert monitor_of(model) is monitor
    step(model, optimizer)
    alive = weakref.ref(model.module), weakref.ref(engine_of(model))
    gc.disable()
    try:
        del model, optimizer
        assert alive[0]() is None and alive[1]() is None  # without a cycle collection
    finally:
        gc.enable()
    assert records.closed == 1
    assert isinstance(monitor.subscribers[0], CsvFile)
    with pytest.raises(ValueError, match="closed"):
        monitor.subscribers[0].write({"step": 1})


@on_ranks(1, stand_in=True)
def test_a_row_waits_for_the_accelerators_values(world: World) -> None:
    model, optimizer = prepared(world, 3, device="stand_in")
    records = RecordingWriter()
    monitor = Monitor(engine_of(model), [records])
    for number in range(3):
        train(world, model, optimizer, 1, first=number)
        assert len(records.rows) <= number
        torch.accelerator.synchronize()
    assert len(records.rows) == 2
    monitor.close()
    assert [row["step"] for row in records.rows] == [1, 2, 3]
    assert [row["loss"] is not None for row in records.rows] == [True, True, False]
    assert 0 < records.rows[0]["loss"] < 100
    for name in ("device/forward", "device/backward", "device/step"):
        assert [row[name] is not None for row in records.rows] == [True, True, False]
        assert 0 <= records.rows[0][name] < 60


TRAINS = """
import sys, torch, zero_ext
from torch import nn
from zero_ext.monitor import Monitor, CsvFile, JsonLines
model = nn.Linear(3, 1)
model, optimizer = zero_ext.prepare(model, torch.optim.SGD(model.parameters(), lr=0.25), {"monitor": {
    "output_dir": sys.argv[1], "csv": True, "trace": {"first_step": 1, "steps": 10**6}}})
for step in range(int(sys.argv[2])):
    model(torch.randn(2, 3)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 20: print("ready", flush=True)
"""


@pytest.mark.parametrize("killed", [True, False])
def test_files_are_complete_after_a_kill_and_after_an_exit(tmp_path: Path, killed: bool) -> None:
    steps = 10**9 if killed else 30
    command = [sys.executable, "-c", TRAINS, str(tmp_path), str(steps)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
    assert child.stdout is not None and child.stdout.readline() == b"ready\n"
    if killed:
        os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == (-signal.SIGKILL if killed else 0)
    child.stdout.close()
    rows = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)) and len(rows) > 20
    table = (tmp_path / "steps.csv").read_text()
    assert table.endswith("\n") and len({line.count(",") for line in table.splitlines()}) == 1
    trace = tmp_path / "trace-rank0.json"
    assert trace.exists() == (not killed)
    if not killed:
        spans = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
        assert sum(span["name"] == "step" for span in spans) == 30 == len(rows)


def test_plain_subscribers(tmp_path: Path) -> None:
    model, optimizer = small()
    events: list[Event] = []
    with CsvFile(tmp_path / "steps.csv") as rows:
        subscribe(model, rows, events.append)
        step(model, optimizer)
    assert events and len((tmp_path / "steps.csv").read_text().splitlines()) == 2


def test_a_forked_child_leaves_the_files_alone(tmp_path: Path) -> None:
    model, optimizer = small()
    log = JsonLines(tmp_path / "log.jsonl")
    monitor = Monitor(engine_of(model), [log])
    step(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        monitor.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    step(model, optimizer)
    monitor.close()
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 2


@on_ranks(1, 2)
def test_who_writes_what(world: World) -> None:
    folder = world.shared_folder()
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
