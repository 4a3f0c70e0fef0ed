"""Which contenders meet, and who may be resident together."""

import pytest

from benchmarks.harness.matches import (
    STEP_MATCHES,
    contenders_of,
    expected_bytes,
    order_of_round,
    select,
    split_to_fit,
)
from benchmarks.harness.shapes import SHAPES
from benchmarks.peers import CONTENDERS, contender_named, trainer_class


def test_every_match_names_known_contenders() -> None:
    for match in STEP_MATCHES:
        for key in (match.subject, *match.peers):
            assert contender_named(key).key == key
        assert contender_named(match.subject).family == "zero_ext"


def test_contenders_of_a_match_have_equal_resources() -> None:
    for match in STEP_MATCHES:
        resources = {
            (CONTENDERS[key].ranks, CONTENDERS[key].threads) for key in (match.subject, *match.peers)
        }
        assert len(resources) == 1


def test_only_selects_the_named_contenders() -> None:
    (match,) = select(STEP_MATCHES, ["stage3", "fsdp2"])
    assert (match.subject, match.peers) == ("stage3", ("fsdp2",))
    assert select(STEP_MATCHES, []) == list(STEP_MATCHES)
    assert select(STEP_MATCHES, ["ddp"]) == []
    with pytest.raises(ValueError, match="stage9"):
        select(STEP_MATCHES, ["stage9"])


SHAPE = SHAPES["239m"]


def test_a_match_is_split_when_memory_is_short() -> None:
    match = STEP_MATCHES[0]
    all_bytes = expected_bytes((match.subject, *match.peers), SHAPE)
    assert split_to_fit([match], SHAPE, all_bytes) == [[match]]
    fitting = split_to_fit([match], SHAPE, all_bytes - 1)
    assert [[(each.subject, each.bars) for each in group] for group in fitting] == [
        [("stage3", (bar,))] for bar in match.bars
    ]


def test_matches_with_a_common_peer_share_rounds_in_memory_that_suffices() -> None:
    groups = split_to_fit(STEP_MATCHES, SHAPE, 1 << 60)
    assert [contenders_of(group) for group in groups] == [
        ("stage3", "fsdp2", "deepspeed3", "stage3-gloo"),
        ("stage2", "fsdp2-keep", "deepspeed2", "stage2-gloo"),
        ("stage1", "ddp", "deepspeed1", "stage1-gloo", "stage0"),
        ("stage3@1", "plain@1", "stage2@1", "stage1@1"),
    ]
    stage3 = groups[0]
    split = split_to_fit(stage3, SHAPE, expected_bytes(contenders_of(stage3), SHAPE) - 1)
    assert split == [[match] for match in stage3]


def test_a_subject_alone_is_timed_whether_it_fits_or_not() -> None:
    alone = select(STEP_MATCHES, ["stage0"])
    assert split_to_fit(alone, SHAPE, 0) == [alone]


def test_rounds_alternate_direction() -> None:
    assert order_of_round("abc", 0) == ["a", "b", "c"]
    assert order_of_round("abc", 1) == ["c", "b", "a"]


def test_unknown_family_is_refused() -> None:
    with pytest.raises(ValueError, match="nobody"):
        trainer_class("nobody")
