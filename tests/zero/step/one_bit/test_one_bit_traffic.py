"""Bytes that the one-bit family sends, scales, padding and small agreements counted."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.step.one_bit.training import COURSES, check_same, parameters, prepared, train
from zero_ext.config.buffer_sizes import sign_payload_bytes
from zero_ext.optim.one_bit import CompressionPhase
from zero_ext.zero import engine_of

WIDTH = 1024


def sent_by_phase(world: World, stage: int, optimizer: Any, steps: int) -> dict[CompressionPhase, int]:
    """Bytes that this rank sends in a step of every kind, of a model in bfloat16."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False))
    made = optimizer(model.parameters())
    model, stepped = zero_ext.prepare(
        model,
        made,
        {"stage": stage, "precision": {"dtype": "bf16"}, "timeout_seconds": 120.0},
        process_group=world.group,
    )
    found: dict[CompressionPhase, int] = {}
    for step in range(1, steps + 1):
        model(torch.ones(1, WIDTH, dtype=torch.bfloat16)).float().square().mean().backward()
        stepped.step()
        stepped.zero_grad()
        found[made.phase(step, stage == 1)] = sum(engine_of(model).traffic.last_bytes_sent.values())
    return found


def all_reduce_bytes(world: World) -> float:
    """What a rank sends of the model's gradients in an fp16 all-reduce."""
    elements = 2 * WIDTH * WIDTH + WIDTH
    return 2 * 2 * elements * (world.size - 1) / world.size


@pytest.mark.parametrize(
    ("kind", "stage", "warm_up", "wanted"),
    [("OneBitAdam", 0, 0.15, 4.9), ("OneBitAdam", 1, 0.15, 4.9), ("OneBitLamb", 0, 0.16, 4.6)],
)
@on_ranks(2, 4)
def test_payloads_are_a_sixteenth(world: World, kind: str, stage: int, warm_up: float, wanted: float) -> None:
    found = sent_by_phase(world, stage, lambda params: getattr(zero_ext, kind)(params, freeze_step=2), 3)
    full = all_reduce_bytes(world)
    (after,) = (sent for phase, sent in found.items() if phase is not CompressionPhase.FULL)
    assert full / after >= 15.8
    assert full / (warm_up * found[CompressionPhase.FULL] + (1 - warm_up) * after) >= wanted


@on_ranks(2)
def test_0_1_adam_sends_a_fifteenth_over_a_run(world: World) -> None:
    policy = {"var_freeze_step": 3, "var_update_scaler": 1, "local_step_scaler": 1, "local_step_clipper": 2}
    found = sent_by_phase(world, 0, lambda params: zero_ext.ZeroOneAdam(params, eps=1.0, **policy), 8)
    assert found.keys() == {
        CompressionPhase.FULL,
        CompressionPhase.GRADIENT,
        CompressionPhase.LOCAL,
        CompressionPhase.DRIFT,
    }
    assert found[CompressionPhase.LOCAL] < 150  # agreements alone
    # DeepSpeed's policy for BERT over its 118,000 steps, and the default one, up to the freeze alone.
    for freeze, steps in ((23000, 118000), (100000, 100000)):
        published = zero_ext.ZeroOneAdam([torch.zeros(1)], var_freeze_step=freeze)
        counts = Counter(published.phase(step, False) for step in range(1, steps + 1))
        sent = sum(count * found[phase] for phase, count in counts.items())
        assert all_reduce_bytes(world) * steps / sent >= 15


@pytest.mark.parametrize("name", ["1-bit Adam", "1-bit Adam, moments sharded"])
@on_ranks(4)
def test_payloads_cross_to_another_node_once(world: World, name: str) -> None:
    course = COURSES[name]
    flat, flat_optimizer, _ = prepared(world, course, world.seed)
    losses = train(world, course, world.seed, flat, flat_optimizer, range(course.steps))
    model, optimizer, _ = prepared(world, course, world.seed, communication={"ranks_per_node": 2})
    assert train(world, course, world.seed, model, optimizer, range(course.steps)) == losses
    check_same(parameters(model), parameters(flat))
    traffic, engine = engine_of(model).traffic, engine_of(model)
    messages = sum(sign_payload_bytes(unit.layout.shard_numel) for unit in engine.units)
    assert traffic.last_bytes_sent["onebit_all_gather"] == 3 * messages
    assert traffic.last_crossing_bytes["onebit_all_gather"] == messages
    assert traffic.last_bytes_sent["onebit_reduce_scatter"] == 3 * messages
    assert traffic.last_elements["onebit_reduce_scatter"] == sum(unit.layout.numel for unit in engine.units)
    assert traffic.last_bytes_sent.keys() == {"scalars", "onebit_reduce_scatter", "onebit_all_gather"}
