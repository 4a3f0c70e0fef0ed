"""Which contenders meet, and who may be resident together."""

import pytest

from benchmarks.harness.matches import STEP_MATCHES, expected_bytes, order_of_round, select, split_to_fit
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


def test_a_match_is_split_when_memory_is_short() -> None:
    match, shape = STEP_MATCHES[0], SHAPES["239m"]
    all_bytes = expected_bytes((match.subject, *match.peers), shape)
    assert split_to_fit(match, shape, all_bytes) == [match]
    fitting = split_to_fit(match, shape, all_bytes - 1)
    assert [(each.subject, each.bars) for each in fitting] == [("stage3", (bar,)) for bar in match.bars]


def test_rounds_alternate_direction() -> None:
    assert order_of_round("abc", 0) == ["a", "b", "c"]
    assert order_of_round("abc", 1) == ["c", "b", "a"]


def test_unknown_family_is_refused() -> None:
    with pytest.raises(ValueError, match="nobody"):
        trainer_class("nobody")
