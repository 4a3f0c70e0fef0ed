"""How a step's time divides, and the bytes of an engine against what is there."""

from __future__ import annotations

import json
import random
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch

import zero_ext
from tests.monitor.watched import prepared, train
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.training import gathered_once
from zero_ext.config.events import CollectiveEnd, Event, PhaseEnd, StepEnd, WaitEnd
from zero_ext.monitor import CommsLog, EngineBytes, StepTimes, resident_bytes
from zero_ext.plan import bytes_sent, collective_elements
from zero_ext.zero import engine_of

KINDS = {
    "gather": "gather",
    "gather_persistent": "gather",
    "gather_updated": "gather",
    "reduce_scatter": "reduce",
    "reduce_scatter_persistent": "reduce",
    "gather_gradients": "reduce",
    "scalars": "agreement",
    "broadcast": "agreement",
}


def test_sums_of_made_up_events(seed: int = 0) -> None:
    seed = random.SystemRandom().randrange(2**31)
    print("seed", seed)
    chance = random.Random(seed)
    times = StepTimes()
    for step in range(1, 4):
        wanted: dict[str, float] = defaultdict(float)
        events: list[Event] = []
        for _ in range(30):
            seconds = chance.random()
            which = chance.randrange(3)
            if which == 0:
                phase = chance.choice(["forward", "backward", "step"])
                events.append(PhaseEnd(phase, 0.0, seconds))  # type: ignore[arg-type]
                wanted[f"time/{phase}"] += seconds
            elif which == 1:
                what = chance.choice(["storage", "update"])
                events.append(WaitEnd(what, 0.0, seconds))  # type: ignore[arg-type]
                wanted[f"wait/{what}"] += seconds
            else:
                kind = chance.choice(list(KINDS))
                events.append(CollectiveEnd(kind, "", 2, 1, 1, 0.0, seconds))
                wanted[f"wait/{KINDS[kind]}"] += seconds
        for event in events:
            times(event)
        end = StepEnd(step, None, None, (), False, 1.0, 100.0)
        times(end)
        found = times.values(end)
        phases = sum(wanted[f"time/{phase}"] for phase in ("forward", "backward", "step"))
        assert found.pop("time/other") == pytest.approx(100.0 - phases)
        assert len(found) == 8
        assert found == {name: pytest.approx(wanted[name]) for name in found}


@on_ranks(1, 2)
def test_phases_and_the_rest_add_up_to_the_step(world: World) -> None:
    model, optimizer = prepared(world, 3, gradient_clipping=1.0)
    times = StepTimes()
    rows: list[tuple[float, dict[str, float]]] = []

    def keep(event: Event) -> None:
        times(event)
        if isinstance(event, StepEnd):
            rows.append((event.seconds, times.values(event)))  # type: ignore[arg-type]

    engine_of(model).subscribe(keep)
    train(world, model, optimizer, 3)
    for seconds, row in rows:
        phases = [row[f"time/{name}"] for name in ("forward", "backward", "step", "other")]
        assert sum(phases) == pytest.approx(seconds, rel=1e-9) and min(phases) >= 0
        waits = [value for name, value in row.items() if name.startswith("wait/")]
        assert 0 <= sum(waits) <= sum(phases[:3])
        assert all((value > 0) == (world.size > 1) for value in waits[:3])  # gather, reduce, agreement
        assert waits[3:] == [0.0, 0.0]


@on_ranks(1, 2, 3)
def test_bytes_sent_are_those_of_the_formula(world: World) -> None:
    for stage in range(4):
        model, optimizer = prepared(world, stage, units={"prefetch_elements": 0})  # all steps are alike
        engine = engine_of(model)
        elements = sum(unit.layout.numel for unit in engine.units)
        source = EngineBytes(engine)
        rows = []

        def keep(event: Event) -> None:
            if isinstance(event, StepEnd):
                rows.append(source.values(event))  # noqa: B023

        with tempfile.TemporaryDirectory() as folder:
            comms = CommsLog(Path(folder) / "comms.jsonl")
            engine.subscribe(keep)
            engine.subscribe(comms)
            train(world, model, optimizer, 3)
            comms.close()
            lines = [json.loads(line) for line in (Path(folder) / "comms.jsonl").read_text().splitlines()]
        once = engine.index[model.embedding.weight][0].layout.numel
        kinds = collective_elements(stage, world.size, elements, gathered_once=once)
        wanted = bytes_sent(kinds, world.size, 4)
        for number, row in enumerate(rows, 1):
            found = {
                name.removeprefix("traffic/"): value for name, value in row.items() if "traffic/" in name
            }
            flags = found.pop("scalars")
            assert (flags > 0) == (world.size > 1)  # type: ignore[operator]
            assert {kind: sent for kind, sent in found.items() if sent} == wanted
            logged = {line["kind"]: line for line in lines if line["step"] == number}
            assert {kind: logged[kind]["bytes_sent"] for kind in logged if kind in wanted} == wanted
            units = len(engine.units)
            for kind in wanted:
                assert logged[kind]["ranks"] == world.size and logged[kind]["seconds"] >= 0
                assert logged[kind]["collectives"] == (2 * units - 1 if kind == "gather" else units)
        assert flags == engine.traffic.last_bytes_sent["scalars"]
        totals = {each.kind: each.bytes_sent for each in comms.totals}
        assert {kind: totals[kind] for kind in wanted} == {kind: 3 * sent for kind, sent in wanted.items()}
        assert all(kind in comms.table() for kind in wanted)


@on_ranks(1, 2)
def test_held_bytes_equal_the_memory_breakdown(world: World) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for offload in (
            {},
            {"params": "nvme", "grads": "host", "optimizer": "nvme", "nvme_paths": [folder]},
            {"optimizer": "host", "update_mode": "delayed"},
        ):
            model, optimizer = prepared(world, 3, offload=offload)
            engine = engine_of(model)
            source = EngineBytes(engine)
            rows: list[tuple[dict[str, object], Counter[tuple[str, str]]]] = []

            def keep(event: Event) -> None:
                if isinstance(event, StepEnd):
                    moved = Counter(engine.tiers.transfers.last_moved)  # noqa: B023
                    rows.append((dict(source.values(event)), moved))  # noqa: B023

            engine.subscribe(keep)
            train(world, model, optimizer, 2)
            model.finish_update()
            wanted = {tier: sum(kinds.values()) for tier, kinds in engine.memory_by_tier().items()}
            row, moved = rows[-1]
            assert {tier: row[f"memory/{tier}"] for tier in wanted} == wanted
            assert (wanted["nvme"] > 0) == (offload.get("params") == "nvme")
            assert 0.5 < row["memory/process"] / resident_bytes() < 2  # type: ignore[operator]
            found = {name: value for name, value in row.items() if name.startswith("transfer/")}
            assert found == {f"transfer/{one}_to_{other}": nbytes for (one, other), nbytes in moved.items()}
            assert bool(found) == bool(offload)
    assert torch.accelerator.current_accelerator() is None  # else memory/allocated would be there
    assert "memory/allocated" not in row


@on_ranks(2)
def test_units_below_the_persistence_threshold_count_with_the_others(world: World) -> None:
    # Biases and norms stay whole: they are reduced, and gathered once after the step.
    model, optimizer = prepared(world, 3, units={"persistence_threshold": 20})
    engine = engine_of(model)
    small = sum(unit.layout.numel for unit in engine.units if not unit.placement.params)
    large = sum(unit.layout.numel for unit in engine.units if unit.placement.params)
    assert small and large
    source = EngineBytes(engine)
    rows = []

    def keep(event: Event) -> None:
        if isinstance(event, StepEnd):
            rows.append(source.values(event))

    engine.subscribe(keep)
    train(world, model, optimizer, 2)
    kinds = collective_elements(3, world.size, large, gathered_once=gathered_once(engine))
    wanted = Counter(bytes_sent(kinds, world.size, 4))
    wanted += Counter(bytes_sent(collective_elements(2, world.size, small), world.size, 4))
    found = {
        name.removeprefix("traffic/"): sent for name, sent in rows[-1].items() if name.startswith("traffic/")
    }
    assert {kind: sent for kind, sent in found.items() if sent and kind != "scalars"} == dict(wanted)


@on_ranks(2)
def test_matrices_of_muon_are_in_the_rows_and_the_table(world: World) -> None:
    model, optimizer = prepared(world, 2, make=zero_ext.Muon)
    engine, rows = engine_of(model), []
    source = EngineBytes(engine)

    def keep(event: Event) -> None:
        if isinstance(event, StepEnd):
            rows.append(source.values(event))

    with tempfile.TemporaryDirectory() as folder:
        comms = CommsLog(Path(folder) / "comms.jsonl")
        engine.subscribe(keep)
        engine.subscribe(comms)
        train(world, model, optimizer, 1)
        comms.close()
    sent = engine.traffic.last_bytes_sent["matrices"]
    assert rows[-1]["traffic/matrices"] == sent > 0
    assert "matrices" in comms.table()
