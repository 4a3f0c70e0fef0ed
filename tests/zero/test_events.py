"""What an engine tells its subscribers."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from typing import Any

import pytest
import torch

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import TinyModel, language_batch, language_loss
from tests.zero.training import adamw, configuration, placed, prepared
from zero_ext.config.events import (
    CollectiveEnd,
    DeviceStepEnd,
    Event,
    GatherEvent,
    PhaseEnd,
    ReduceEvent,
    ReleaseEvent,
    StepEnd,
    WaitEnd,
)
from zero_ext.zero import engine_of


def events_of(world: World, stage: int, steps: int = 3, **more: Any) -> tuple[Any, list[list[Event]]]:
    """The events of each of ``steps`` steps."""
    model = TinyModel()
    model, optimizer = prepared(world, model, stage, **more)
    events: list[list[Event]] = []
    engine_of(model).subscribe(lambda event: events[-1].append(event))
    for step in range(steps):
        events.append([])
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (step + 1)
        model.backward(language_loss(model, language_batch(world.seed, step, 0, world.rank)))
        optimizer.step()
        optimizer.zero_grad()
    return model, events


@on_ranks(1, 2, 3)
def test_the_end_of_each_step(world: World) -> None:
    for stage in range(4):
        model, events = events_of(world, stage, gradient_clipping=1.0)
        for number, step in enumerate(events):
            (end,) = [event for event in step if isinstance(event, StepEnd)]
            assert step[-1] is end
            rate = 0.01 * (number + 1)
            assert (end.step, end.lr, end.skipped, end.loss_scale) == (number + 1, (rate,), False, 1.0)
            assert end.grad_norm is not None and end.grad_norm > 0 and end.seconds > 0
            assert len(set(world.everyone(end.grad_norm))) == 1
        assert end.grad_norm == engine_of(model).grad_norm
        _, quiet = events_of(world, stage)
        assert all(step[-1].grad_norm is None for step in quiet)  # nothing asked for the norm


@on_ranks(1, 2, 3)
def test_units_come_and_go(world: World) -> None:
    for stage in range(4):
        model, events = events_of(world, stage)
        units = {unit.name: unit.layout.numel for unit in engine_of(model).units}
        for number, step in enumerate(events):
            gathers = Counter(event.unit for event in step if isinstance(event, GatherEvent))
            releases = Counter(event.unit for event in step if isinstance(event, ReleaseEvent))
            reductions = Counter(event.unit for event in step if isinstance(event, ReduceEvent))
            assert all(
                event.elements == units[event.unit]
                for event in step
                if isinstance(event, GatherEvent | ReleaseEvent | ReduceEvent)
            )
            if stage == 3 and world.size > 1:
                assert gathers == releases
                # In forward and in backward, but for the look-up, and the head once the order is known.
                once = {"embedding", "head"} if number else {"embedding"}
                assert gathers == {name: 1 if name in once else 2 for name in units}
                ahead = [event.prefetched for event in step if isinstance(event, GatherEvent)]
                assert any(ahead) == (number > 0) and not ahead[0]
            else:
                assert not gathers and not releases
            assert reductions == Counter(dict.fromkeys(units, 1))


@on_ranks(2)
def test_a_skipped_step_is_published(world: World) -> None:
    scale = {"initial_power": 30, "hysteresis": 1}
    _, events = events_of(world, 2, precision={"dtype": "fp16"}, loss_scale=scale)
    ends = [step[-1] for step in events]
    assert [end.skipped for end in ends] == [True, True, True]
    assert [end.loss_scale for end in ends] == [2.0**29, 2.0**28, 2.0**27]
    assert torch.tensor(ends[0].grad_norm).isfinite().logical_not()


@on_ranks(1, 2)
@pytest.mark.parametrize(("stage", "tier"), [(0, "device"), (3, "device"), (3, "nvme")])
def test_phases_and_waits_lie_inside_the_step_and_never_overlap(world: World, stage: int, tier: str) -> None:
    kinds = ("params", "grads", "optimizer") if stage else ()
    now = time.perf_counter()
    with placed(dict.fromkeys(kinds, tier)) as offload:
        _, events = events_of(world, stage, offload=offload)
    for step in events:
        phases = [event for event in step if isinstance(event, PhaseEnd)]
        assert [event.phase for event in phases] == ["forward", "backward", "step"]
        assert all(event.trains for event in phases)
        waits = [event for event in step if isinstance(event, WaitEnd | CollectiveEnd)]
        spans = sorted([(event.began, event.began + event.seconds) for event in waits])
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
        full = [(phase.began, phase.began + phase.seconds) for phase in phases]
        for begin, end in full:
            assert now <= begin
            now = end
        assert all(any(first <= begin and end <= last for first, last in full) for begin, end in spans)
        stored = [event.what for event in waits if isinstance(event, WaitEnd)]
        assert set(stored) == ({"storage"} if tier == "nvme" else set())
    assert now <= time.perf_counter()


@on_ranks(1, 2, 3)
def test_collectives_publish_what_the_traffic_stats_count(world: World) -> None:
    for stage in range(4):
        model, events = events_of(world, stage, gradient_clipping=1.0)
        traffic = engine_of(model).traffic
        for step in events[1:]:
            ended = [event for event in step if isinstance(event, CollectiveEnd)]
            elements: Counter[str] = Counter()
            sent: Counter[str] = Counter()
            for event in ended:
                assert event.ranks == world.size and event.label
                elements[event.kind] += event.elements
                sent[event.kind] += event.bytes_sent
            if world.size > 1:
                assert elements == traffic.last_elements and sent == traffic.last_bytes_sent
            else:
                assert not ended


@on_ranks(2)
def test_the_loss_that_went_through_the_engine(world: World) -> None:
    model = TinyModel()
    model, optimizer = prepared(world, model, 2, batch={"gradient_accumulation_steps": 2})
    ends: list[StepEnd] = []

    def keep(event: Event) -> None:
        if isinstance(event, StepEnd):
            ends.append(event)

    engine_of(model).subscribe(keep)
    for step in range(3):
        seen = []
        for micro in range(2):
            loss = language_loss(model, language_batch(world.seed, step, micro, world.rank)) / 2
            seen.append(loss.item())
            if step < 2:
                model.backward(loss)
            else:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert ends[-1].loss == (pytest.approx(sum(seen), rel=1e-6) if step < 2 else None)
    engine_of(model).unsubscribe(keep)
    model.backward(language_loss(model, language_batch(world.seed, 3, 0, world.rank)))
    optimizer.step()
    assert len(ends) == 3


@on_ranks(2, stand_in=True)
def test_an_accelerators_times_and_loss_come_later(world: World) -> None:
    model = TinyModel()
    model, optimizer = zero_ext.prepare(
        model, adamw(model.parameters()), configuration(3), process_group=world.group, device="stand_in"
    )
    events: list[Event] = []
    engine_of(model).subscribe(events.append)
    seen = []
    for step in range(3):
        batch = language_batch(world.seed, step, 0, world.rank).to("stand_in")
        loss = language_loss(model, batch)
        seen.append(loss.item())
        model.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    assert [event.loss for event in events if isinstance(event, StepEnd)] == [None] * 3
    arrived = [event for event in events if isinstance(event, DeviceStepEnd)]
    assert [event.step for event in arrived] == list(range(1, len(arrived) + 1)) and len(arrived) <= 2
    torch.accelerator.synchronize()  # what is due by now is told at the end of the next step
    loss = language_loss(model, language_batch(world.seed, 3, 0, world.rank).to("stand_in"))
    model.backward(loss)
    optimizer.step()
    arrived = [event for event in events if isinstance(event, DeviceStepEnd)]
    assert [event.step for event in arrived] == [1, 2, 3]
    assert [event.loss for event in arrived] == seen
    phases = [event for event in events if isinstance(event, PhaseEnd)]
    for number, event in enumerate(arrived):
        mine = {phase.phase: phase.seconds for phase in phases[3 * number : 3 * number + 3]}
        assert set(event.seconds) == set(mine) and all(0 <= each < 60 for each in event.seconds.values())


@on_ranks(2)
def test_a_delayed_update_is_waited_for_and_publishes_nothing_itself(world: World) -> None:
    with placed({"optimizer": "nvme", "update_mode": "delayed"}) as offload:
        _, events = events_of(world, 2, steps=4, offload=offload)
        assert all(event.what == "update" for step in events for event in step if isinstance(event, WaitEnd))
