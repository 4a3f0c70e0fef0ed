"""Wire volumes against the closed formulas, and against a schedule that is walked event by event."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_ext.plan import bytes_sent, collective_elements


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize(
    ("stage", "no_sync", "multiple"),
    [
        (0, False, lambda k: 2),
        (0, True, lambda k: 2),
        (1, False, lambda k: 2),
        (1, True, lambda k: 2),
        (2, False, lambda k: k + 1),
        (2, True, lambda k: 2),
        (3, False, lambda k: 3 * k),
        (3, True, lambda k: 2 * k + 1),
    ],
)
def test_closed_formulas(stage: int, no_sync: bool, multiple, k: int) -> None:
    kinds = collective_elements(stage, 4, 1024, accumulation_steps=k, no_sync=no_sync)
    assert sum(kinds.values()) == multiple(k) * 1024


@settings(deadline=None)
@given(
    st.integers(0, 3),
    st.integers(1, 9),
    st.integers(0, 10**9),
    st.integers(0, 10**9),
    st.integers(1, 6),
    st.booleans(),
)
def test_each_kind_against_a_walk_through_one_step(
    stage: int, world_size: int, trainable: int, frozen: int, k: int, no_sync: bool
) -> None:
    walked = {"gather": 0, "gather_updated": 0, "reduce_scatter": 0, "gather_gradients": 0}
    for micro_batch in range(k):
        if stage == 3:
            walked["gather"] += 2 * (trainable + frozen)  # forward and backward
        if micro_batch == k - 1 or (stage >= 2 and not no_sync):
            walked["reduce_scatter"] += trainable
    if stage == 0:
        walked["gather_gradients"] += trainable
    if stage in (1, 2):
        walked["gather_updated"] += trainable
    if world_size == 1:
        walked = dict.fromkeys(walked, 0)
    found = collective_elements(
        stage, world_size, trainable, frozen=frozen, accumulation_steps=k, no_sync=no_sync
    )
    assert {**dict.fromkeys(walked, 0), **found} == walked


def test_a_rank_sends_all_but_its_own_shard() -> None:
    assert bytes_sent({"gather": 1024, "reduce_scatter": 512}, 4, 2) == {
        "gather": 1536,
        "reduce_scatter": 768,
    }
    assert bytes_sent({"gather": 1024}, 1, 2) == {"gather": 0}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"stage": 4}, "stage: expected .*, got 4"),
        ({"stage": 4, "world_size": 1}, "stage: expected .*, got 4"),
        ({"world_size": 0}, "world_size: expected .*, got 0"),
        ({"trainable": -1}, "trainable: expected .*, got -1"),
        ({"frozen": 0.5}, "frozen: expected .*, got 0.5"),
        ({"accumulation_steps": 0}, "accumulation_steps: expected .*, got 0"),
    ],
)
def test_impossible_arguments_are_refused_by_name(arguments: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        collective_elements(**{"stage": 3, "world_size": 2, "trainable": 8, **arguments})
