"""Plans of Adafactor against runs: master weights, averages of rows, columns and vectors, and their sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.plan.test_plan_against_engine import (
    MACHINE,
    PLACEMENTS,
    WITHIN,
    Decoder,
    configuration,
    of_rank,
    planned,
)
from zero_ext.plan.simulation import Training, simulate
from zero_ext.plan.simulation.run_memory import memory_needs
from zero_ext.plan.simulation.simulate import estimate_step
from zero_ext.zero import engine_of


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """As text: it goes to other processes."""
    return str(tmp_path)


@on_ranks(1, 2, 3, by_turns=True)
@pytest.mark.parametrize(
    ("stage", "tiers"), [each for each in PLACEMENTS if each[1].get("update_mode") != "delayed"]
)
def test_a_real_run_holds_and_sends_what_was_planned(
    world: World, stage: int, tiers: dict[str, str], folder: str
) -> None:
    found = planned(128, 4, 700, 32, tied=False)
    config: dict[str, Any] = configuration(stage, tiers, 1, folder)
    torch.manual_seed(0)
    model = Decoder(found.shape)
    matrices = [each.shape for each in model.parameters() if each.dim() == 2]
    vectors = sum(each.numel() for each in model.parameters() if each.dim() == 1)
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-3)
    model, optimizer = zero_ext.prepare(model, optimizer, config, process_group=world.group)
    for _ in range(2):
        model(torch.randint(700, (2, 32))).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    engine = engine_of(model)
    training = Training.of_config(config | {"optimizer": {"type": "Adafactor"}}, world.size)
    needs = memory_needs(found.full_cost, training, MACHINE)
    held = engine.memory_by_tier()
    for tier, kinds in held.items():
        # A rank's shards have more or fewer vectors than others.
        mean = sum(world.everyone(kinds["optimizer"])) / world.size
        assert of_rank(needs, tier)["optimizer"] == pytest.approx(mean, rel=WITHIN, abs=1), tier

    # Besides master weights: 4 bytes for each row and column on all ranks, and for own elements of vectors.
    lines = sum(map(sum, matrices))
    statistics = sum(engine.optimizer_step.stepper.state_bytes().values())
    owners = world.size if stage else 1
    total = sum(world.everyone(statistics)) / world.size
    assert total == pytest.approx(4 * (lines + vectors / owners), rel=1e-6)

    # The sums travel as float64, and agreements of some bytes with them.
    sent = sum(engine.traffic.last_bytes_sent.values())
    assert estimate_step(found.full_cost, training, MACHINE).sent == pytest.approx(sent, rel=0.01)
    sums = engine.traffic.last_bytes_sent["scalars"]
    if stage and world.size > 1:
        assert sums == pytest.approx(8 * lines * (world.size - 1), rel=WITHIN)
    spans = simulate(found.full_cost, training, MACHINE).timeline.spans
    assert ("rows and columns" in {span.name for span in spans}) == (stage > 0 and world.size > 1)
