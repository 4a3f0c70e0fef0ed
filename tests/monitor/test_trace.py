"""Traces as Perfetto reads them, and the memory timeline."""

from __future__ import annotations

import json
import struct
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.monitor.watched import prepared, train
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.training import units_gathered_once
from zero_ext.config import TraceConfig
from zero_ext.config.events import Event, StepEnd
from zero_ext.monitor import Trace
from zero_ext.monitor.file_writers import write_atomically
from zero_ext.zero import engine_of


def traced(world: World, folder: Path, **more: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]], Any]:
    """Events of steps 2 and 3 of 4, the memory breakdown at the end of these, the model."""
    model, optimizer = prepared(world, 3, **more)
    engine = engine_of(model)
    breakdowns: list[dict[str, Any]] = []

    def keep(event: Event) -> None:
        if isinstance(event, StepEnd) and event.step in (2, 3):
            breakdowns.append(engine.memory_by_tier(wait=False))

    engine.subscribe(keep)
    trace = Trace(engine, folder, TraceConfig(first_step=2, steps=2, plot=True))
    engine.subscribe(trace)
    assert trace.path == folder / f"trace-rank{world.rank}.json"
    train(world, model, optimizer, 2)
    assert not trace.path.exists()
    train(world, model, optimizer, 2, first=2)
    written = trace.path.read_bytes()
    trace.close()
    assert trace.path.read_bytes() == written
    found = json.loads(written)
    assert found["displayTimeUnit"] == "ms"
    return found["traceEvents"], breakdowns, model


@on_ranks(1, 2)
def test_spans_units_and_counters(world: World) -> None:
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as nvme:
        offload = {"params": "nvme", "grads": "host", "optimizer": "nvme", "nvme_paths": [nvme]}
        events, breakdowns, model = traced(world, Path(folder), offload=offload)
        assert {event["pid"] for event in events} == {world.rank}
        assert all(event["ts"] > 0 for event in events if event["ph"] != "M")
        phases = [event for event in events if event["ph"] == "X" and event["tid"] == 1]
        assert [event["name"] for event in phases] == ["forward", "backward", "step"] * 2
        assert [event["args"]["step"] for event in phases] == [2] * 3 + [3] * 3
        waits = [event for event in events if event["ph"] == "X" and event["tid"] == 2]
        names = {event["name"] for event in waits}
        assert names == {"storage"} | ({"gather", "reduce", "agreement"} if world.size > 1 else set())
        spans = [(event["ts"], event["ts"] + event["dur"]) for event in phases]
        for event in waits:
            begin, end = event["ts"], event["ts"] + event["dur"]
            assert any(first <= begin and end <= last for first, last in spans), event
        units = {unit.name: unit.layout.nbytes for unit in engine_of(model).units}
        begun = [event for event in events if event["ph"] == "b"]
        ended = [event for event in events if event["ph"] == "e"]
        once = len(units_gathered_once(engine_of(model)))
        assert len(begun) == len(ended) == 2 * (2 * len(units) - once)  # forward and backward of two steps
        assert all(event["args"]["bytes"] == units[event["id"]] for event in begun + ended)
        live = [event["args"]["bytes"] for event in events if event["name"] == "gathered"]
        assert live[-1] == 0 and max(live) >= max(units.values()) and len(live) == len(begun + ended)
        for tier in ("device", "host", "nvme"):
            samples = [event["args"] for event in events if event["name"] == f"memory {tier}"]
            assert len(samples) == 9  # at the beginning, and three phases and the end of two steps
            assert [samples[4], samples[8]] == [one[tier] for one in breakdowns]
        assert sum(samples[-1].values()) > 0
        resident = [event["args"]["resident"] for event in events if event["name"] == "memory process"]
        assert len(resident) == 9 and min(resident) > 2**20
        image = (Path(folder) / f"memory-rank{world.rank}.png").read_bytes()
        assert image[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = struct.unpack(">II", image[16:24])
        assert width == 800 and 300 < height < 1200
        assert not list(Path(folder).glob(".*"))


@on_ranks(2)
def test_a_delayed_update_is_not_disturbed(world: World) -> None:
    with tempfile.TemporaryDirectory() as folder:
        events, breakdowns, _ = traced(
            world, Path(folder), offload={"optimizer": "host", "update_mode": "delayed"}
        )
        samples = [event["args"] for event in events if event["name"] == "memory host"]
        assert samples[-1] == breakdowns[-1]["host"] and 3 <= len(samples) <= 9


def test_a_file_is_replaced_atomically(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("old")
    (tmp_path / ".trace.json.new").mkdir()
    with pytest.raises(OSError):
        write_atomically(path, [b"new"])
    assert path.read_text() == "old"
    (tmp_path / ".trace.json.new").rmdir()
    write_atomically(path, [b"new"])
    assert path.read_text() == "new" and [entry.name for entry in tmp_path.iterdir()] == ["trace.json"]
