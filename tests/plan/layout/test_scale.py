"""175 billion and a trillion parameters on 1,024 simulated ranks: bytes and a step's schedule as planned."""

from __future__ import annotations

import pytest

from benchmarks.harness.simulated_layout import planned_layout, untied
from benchmarks.harness.simulated_process import simulated
from zero_ext.plan import collective_elements
from zero_ext.plan.layout.parallel_layout import stages_of
from zero_ext.plan.simulation.planned_units import padded_elements


@pytest.mark.parametrize(
    ("name", "lengths", "zero", "micro_batches", "stages"),
    [("gpt-175b", (8, 16, 8), 1, 24, (0, 7)), ("gpt-1t", (16, 8, 8), 3, 32, (7,))],
)
def test_a_rank_of_1024_holds_and_does_what_was_planned(
    name: str, lengths: tuple[int, int, int], zero: int, micro_batches: int, stages: tuple[int, ...]
) -> None:
    """Of the 1,024 ranks one of some pipeline stages is made; those of a stage are alike."""
    pp, dp, tp = lengths
    layout, model = planned_layout(pp, dp, tp, zero, micro_batches), untied(name)
    assert layout.gpus == 1024
    for stage in stages:
        rank = simulated(
            "simulated_layout",
            f"stage {stage}",
            name=name,
            lengths=lengths,
            zero=zero,
            micro_batches=micro_batches,
            stage=stage,
        )
        assert rank["held"] == pytest.approx(rank["planned"], rel=0.001), stage
        assert rank["forwards"] == rank["backwards"] == micro_batches
        assert rank["in_flight"] == layout.training_of(stage).in_flight
        assert rank["turns"] == micro_batches + pp - 1
        kind = next(kind for kind in stages_of(model, pp, tp) if stage in kind.numbers)
        padded = padded_elements(kind.cost, layout.training)
        wanted = collective_elements(zero, dp, padded, accumulation_steps=micro_batches)
        assert rank["exchanged"] == pytest.approx(wanted, rel=0.001)
