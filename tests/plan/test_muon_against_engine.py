"""Plans of Muon against runs: state, staging, traffic, and operations by rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.plan.test_plan_against_engine import (
    MACHINE,
    PLACEMENTS,
    STATE,
    WITHIN,
    Decoder,
    configuration,
    of_rank,
    planned,
)
from zero_ext.plan.models import ModelSpec
from zero_ext.plan.simulation import Training, simulate
from zero_ext.plan.simulation.planned_units import hidden_matrices
from zero_ext.plan.simulation.run_memory import memory_needs
from zero_ext.plan.simulation.simulate import estimate_step
from zero_ext.zero import Engine, engine_of


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """As text: it goes to other processes."""
    return str(tmp_path)


def trained(world: World, found: ModelSpec, config: dict[str, Any], ns_dtype: str) -> tuple[Engine, int]:
    """The engine after two steps, and the operations of this rank in the last update."""
    torch.manual_seed(0)
    model = Decoder(found.shape)
    assert sum(parameter.numel() for parameter in model.parameters()) == found.parameters
    optimizer = zero_ext.Muon(model.parameters(), lr=1e-3, ns_dtype=ns_dtype, module=model)
    model, optimizer = zero_ext.prepare(model, optimizer, config, process_group=world.group)
    for _ in range(2):
        with FlopCounterMode(display=False) as counter:
            loss = model(torch.randint(700, (2, 32))).float().square().mean()
            forward = counter.get_total_flops()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    engine = engine_of(model)
    engine.keep_model_for_test = model  # the engine holds its model weakly
    # Backward computes the gradients of inputs and weights.
    return engine, counter.get_total_flops() - 3 * forward


@on_ranks(1, 2, 3, by_turns=True)
@pytest.mark.parametrize(
    ("stage", "tiers", "ns_dtype"),
    [*((*each, "bf16") for each in PLACEMENTS), (2, {}, "fp32"), (3, {"optimizer": "host"}, "fp32")],
)
def test_a_real_run_holds_sends_and_computes_what_was_planned(
    world: World, stage: int, tiers: dict[str, str], ns_dtype: str, folder: str
) -> None:
    found = planned(128, 4, 700, 32, tied=False)
    config = configuration(stage, tiers, 1, folder)
    engine, flops = trained(world, found, config, ns_dtype)
    optimizer = {"type": "Muon", "params": {"ns_dtype": ns_dtype}}
    training = Training.of_config(config | {"optimizer": optimizer}, world.size)
    needs = memory_needs(found.full_cost, training, MACHINE)
    padding = 0.0 if training.placement.params else 0.01
    for tier, kinds in engine.memory_by_tier().items():
        wanted = of_rank(needs, tier)
        for kind in (*STATE, "staging"):
            within = WITHIN if kind == "staging" else padding
            assert wanted[kind] == pytest.approx(kinds[kind], rel=within, abs=1), (tier, kind)

    # Momentum and masters of matrices, two moments and masters of the rest.
    matrices = sum(rows * columns for rows, columns in hidden_matrices(found.full_cost))
    rest = found.parameters - matrices
    owners = world.size if stage else 1
    state = sum(kinds["optimizer"] for kinds in engine.memory_by_tier().values())
    if training.optimizer != "nvme":  # there small units have large blocks
        assert state == pytest.approx((8 * matrices + 12 * rest) / owners, rel=WITHIN)

    # Each matrix once, 5 iterations of 2m²n + 2m³ + 2m²n operations, in stage 0 on every rank.
    once = sum(
        5 * (4 * min(shape) ** 2 * max(shape) + 2 * min(shape) ** 3)
        for shape in hidden_matrices(found.full_cost)
    )
    if training.update_mode != "delayed":  # a thread of its own, which nothing counts
        by_rank = world.everyone(flops)
        assert sum(by_rank) == once * (1 if stage else world.size)
        assert simulate(found.full_cost, training, MACHINE).optimizer_flops == max(by_rank)

    # To the owners and back, in the dtype of the iterations. Ranks differ.
    counted = engine.traffic.last_bytes_sent
    sent = sum(nbytes for kind, nbytes in counted.items() if kind != "scalars")
    total = world.size * estimate_step(found.full_cost, training, MACHINE).sent
    assert sum(world.everyone(sent)) == pytest.approx(total, rel=padding, abs=world.size), counted
    assert bool(counted["matrices"]) == (stage > 0 and world.size > 1)
