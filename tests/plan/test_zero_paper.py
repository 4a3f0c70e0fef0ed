"""The planner against the figures of the ZeRO paper (Rajbhandari et al. 2020, arXiv 1910.02054)."""

from __future__ import annotations

from decimal import Decimal

import pytest

from zero_ext.plan import TrainingState, collective_elements, model_state_bytes
from zero_ext.plan.models import model_named
from zero_ext.plan.plan_entry import Batch
from zero_ext.plan.planner import Plan, make_plan
from zero_ext.plan.simulation import MACHINES
from zero_ext.plan.simulation.planned_units import lengths_gathered_once

RANKS = (1, 4, 16, 64, 256, 1024)
# Table 1, GB of model state a device, as printed: by model, then by stage over the ranks.
TABLE = {
    "7.5B": {
        1: ("120", "52.5", "35.6", "31.4", "30.4", "30.1"),
        2: ("120", "41.3", "21.6", "16.6", "15.4", "15.1"),
        3: ("120", "30", "7.5", "1.88", "0.47", "0.12"),
    },
    "128B": {
        1: ("2048", "896", "608", "536", "518", "513"),
        2: ("2048", "704", "368", "284", "263", "257"),
        3: ("2048", "512", "128", "32", "8", "2"),
    },
    "1000B": {
        1: ("16000", "7000", "4750", "4187", "4046", "4011"),
        2: ("16000", "5500", "2875", "2218", "2054", "2013"),
        3: ("16000", "4000", "1000", "250", "62.5", "15.6"),
    },
}


def planned(model: str, gpus: int) -> Plan:
    return make_plan(model_named(model), MACHINES["dgx2-v100"], gpus, Batch(gpus, None, gpus))


def state_gigabytes(plan: Plan, stage: int) -> float:
    row = next(row for row in plan.entries if str(row.candidate) == f"stage {stage}, device")
    held = row.by_kind("device")
    return sum(held[kind] for kind in ("params", "grads", "optimizer")) / 1e9


@pytest.mark.parametrize("model", TABLE)
def test_table_1_within_a_unit_of_the_last_printed_digit(model: str) -> None:
    plans = {ranks: planned(model, ranks) for ranks in RANKS}
    for stage, printed in TABLE[model].items():
        for ranks, text in zip(RANKS, printed, strict=True):
            unit = 10.0 ** int(Decimal(text).as_tuple().exponent)
            found = state_gigabytes(plans[ranks], stage)
            assert abs(found - float(text)) <= unit, (model, stage, ranks, found)


def test_five_billion_on_sixteen_ranks() -> None:
    plan = planned("5B", 16)
    assert f"{state_gigabytes(plan, 2):.1f}" == "14.4"
    assert f"{state_gigabytes(plan, 3):.1f}" == "5.0"


def test_stages_approach_a_fourth_an_eighth_and_one_over_the_ranks() -> None:
    state = TrainingState({"bf16": 10**12})
    for ranks in (64, 1024, 65536):
        replicated, *stages = (model_state_bytes(stage, ranks, state).total for stage in range(4))
        factors = [replicated / stage for stage in stages]
        # 16 / (4 + 12/N), 16 / (2 + 14/N), N
        assert factors == pytest.approx([16 / (4 + 12 / ranks), 16 / (2 + 14 / ranks), ranks], rel=1e-6)
    assert factors[:2] == pytest.approx([4, 8], rel=1e-3)


def test_traffic_is_that_of_data_parallelism_once_once_and_one_and_a_half_times() -> None:
    base, *stages = (sum(collective_elements(stage, 64, 10**9).values()) for stage in range(4))
    assert [stage / base for stage in stages] == [1, 1, 1.5]
    plan = planned("7.5B", 64)
    sent = {row.candidate.stage: row.step.sent for row in plan.entries if row.candidate.distance == 0}
    # Padding included: of buckets in stages 0 to 2, of blocks in stage 3. That gathers the ends of the model
    # once for forward and backward.
    factors = [sent[stage] / sent[0] for stage in (1, 2, 3)]
    (row,) = (row for row in plan.entries if row.candidate.stage == 3 and row.candidate.distance == 0)
    once = lengths_gathered_once(plan.model.full_cost, row.training)
    once_share = sum(numel * units for numel, units in once.items()) / plan.model.parameters
    assert 0.01 < once_share < 0.04
    assert factors == pytest.approx([1, 1, 1.5 - once_share / 2], rel=1e-4)
