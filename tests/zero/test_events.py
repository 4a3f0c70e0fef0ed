"""What an engine tells its subscribers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import TinyModel, language_batch, language_loss
from tests.zero.training import adamw, configuration
from zero_ext.config.events import Event, GatherEvent, ReduceEvent, ReleaseEvent, StepEnd
from zero_ext.zero import engine_of


def heard(world: World, stage: int, steps: int = 3, **more: Any) -> tuple[Any, list[list[Event]]]:
    """The events of each of ``steps`` steps."""
    model = TinyModel()
    model, optimizer = zero_ext.prepare(
        model, adamw(model.parameters()), configuration(stage, **more), process_group=world.group
    )
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
        model, events = heard(world, stage, gradient_clipping=1.0)
        for number, step in enumerate(events):
            (end,) = [event for event in step if isinstance(event, StepEnd)]
            assert step[-1] is end
            assert (end.step, end.lr, end.skipped, end.loss_scale) == (
                number + 1,
                (0.01 * (number + 1),),
                False,
                1.0,
            )
            assert end.grad_norm is not None and end.grad_norm > 0 and end.seconds > 0
            assert len(set(world.everyone(end.grad_norm))) == 1
        assert end.grad_norm == engine_of(model).grad_norm
        _, quiet = heard(world, stage)
        assert all(step[-1].grad_norm is None for step in quiet)  # nothing asked for the norm


@on_ranks(1, 2, 3)
def test_units_come_and_go(world: World) -> None:
    for stage in range(4):
        model, events = heard(world, stage)
        units = {unit.name: unit.layout.numel for unit in engine_of(model).units}
        for number, step in enumerate(events):
            gathers = Counter(event.unit for event in step if isinstance(event, GatherEvent))
            releases = Counter(event.unit for event in step if isinstance(event, ReleaseEvent))
            reductions = Counter(event.unit for event in step if isinstance(event, ReduceEvent))
            assert all(
                event.elements == units[event.unit] for event in step if not isinstance(event, StepEnd)
            )
            if stage == 3 and world.size > 1:
                assert gathers == releases and set(gathers) == set(units)
                assert set(gathers.values()) == {2}  # once in forward, once in backward
                ahead = [event.prefetched for event in step if isinstance(event, GatherEvent)]
                assert any(ahead) == (number > 0) and not ahead[0]
            else:
                assert not gathers and not releases
            assert reductions == Counter(dict.fromkeys(units, 1))


@on_ranks(2)
def test_a_skipped_step_is_told(world: World) -> None:
    scale = {"initial_power": 30, "hysteresis": 1}
    _, events = heard(world, 2, precision={"dtype": "fp16"}, loss_scale=scale)
    ends = [step[-1] for step in events]
    assert [end.skipped for end in ends] == [True, True, True]
    assert [end.loss_scale for end in ends] == [2.0**29, 2.0**28, 2.0**27]
    assert torch.tensor(ends[0].grad_norm).isfinite().logical_not()
