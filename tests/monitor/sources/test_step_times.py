"""How a step's time divides."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from tests.monitor.watched import prepared, train
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.config.events import CollectiveEnd, Event, PhaseEnd, StepEnd, WaitEnd
from zero_ext.monitor import StepTimes
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
