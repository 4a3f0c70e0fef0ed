"""The comparison itself: it sees wrong values, NaN and missing entries, and accepts no crash as a refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_ext
from tests.multi.pool import RankFailure, RankPool
from tests.multi.rank import World
from tests.zoo.case import NAMED_CALL, REFUSED_WHERE_SHARDED, Case
from tests.zoo.comparison import TOLERANCE, Outcome, _difference, _explained, _judged
from tests.zoo.inputs import features, mean_square
from tests.zoo.slice import CASES_PER_CHOSEN, slice_of
from tests.zoo.training import is_refusal


def record(**changes: Any) -> dict[str, Any]:
    """Return what a rank computed."""
    return {
        "losses": [1.0, 0.5],
        "evaluations": [],
        "generated": [torch.tensor([1, 2])],
        "recorded": {"log@0": torch.tensor(2.0)},
        "states": [{"weight": torch.tensor([1.0, float("-inf")]), "steps": torch.tensor(3)}],
        **changes,
    }


WRONG: dict[str, dict[str, Any]] = {
    "loss": {"losses": [1.0, 0.5001]},
    "loss is NaN": {"losses": [float("nan"), 0.5]},
    "fewer losses": {"losses": [1.0]},
    "token": {"generated": [torch.tensor([1, 3])]},
    "nothing recorded": {"recorded": {}},
    "recorded NaN": {"recorded": {"log@0": torch.tensor(float("nan"))}},
    "value": {"states": [{"weight": torch.tensor([1.1, float("-inf")]), "steps": torch.tensor(3)}]},
    "buffer": {"states": [{"weight": torch.tensor([1.0, float("-inf")]), "steps": torch.tensor(4)}]},
    "missing key": {"states": [{"weight": torch.tensor([1.0, float("-inf")])}]},
    "shape": {"states": [{"weight": torch.tensor([1.0]), "steps": torch.tensor(3)}]},
}


@pytest.mark.parametrize("what", list(WRONG))
@pytest.mark.parametrize("rank", [0, 1])
def test_a_wrong_record_of_any_rank_is_seen(what: str, rank: int) -> None:
    records = [record(), record()]
    assert _difference(records, record())[0] == 0.0
    records[rank] = record(**WRONG[what])
    difference, worst = _difference(records, record())
    assert difference > TOLERANCE
    assert worst.endswith(f"rank {rank}")


def test_an_error_of_torch_inside_zero_ext_is_no_refusal() -> None:
    with pytest.raises(ValueError, match="expected one with parameters") as refused:
        zero_ext.prepare(nn.Identity())
    assert is_refusal(refused.value)
    with pytest.raises(RuntimeError) as own:
        raise RuntimeError("zero_ext.gathered is what the message says, but the test raised it")
    assert not is_refusal(own.value)
    code = compile(
        "torch.ones(2) + torch.ones(3)", f"{Path(zero_ext.__file__).parent}/zero/engine.py", "exec"
    )
    with pytest.raises(RuntimeError) as inside:
        exec(code, {"torch": torch})
    assert not is_refusal(inside.value)


def outcome(kind: str, detail: str, variant: str = "3") -> Outcome:
    """Return how a case of this test came out."""
    return Outcome("own/none", variant, kind, detail)


def test_a_refusal_passes_where_it_is_expected() -> None:
    plain = Case("own/none", nn.Identity, features(2), mean_square)
    naive = Case("own/none", nn.Identity, features(2), mean_square, expected=REFUSED_WHERE_SHARDED)
    refused = outcome("refused", "RuntimeError: use zero_ext.gathered(params)")
    assert _judged(naive, refused).passed
    assert not _judged(plain, refused).passed
    assert not _judged(naive, outcome("refused", "RuntimeError: no")).passed
    assert not _judged(naive, outcome("refused", refused.detail, "0")).passed
    assert not _judged(naive, outcome("failed", "zero_ext.gathered")).passed
    assert not _judged(naive, outcome("equal", "0")).passed
    assert NAMED_CALL in naive.expectation("nvme")


def die_on_rank_1(world: World) -> None:
    """Read memory that does not exist, on one of two ranks."""
    import ctypes

    if world.rank == 1:
        ctypes.string_at(0)


def test_a_rank_that_dies_is_a_failure_of_its_case(tmp_path: Path) -> None:
    pool = RankPool(2)
    try:
        with pytest.raises(RankFailure) as failure:
            pool.run(2, f"{__name__}:{die_on_rank_1.__name__}", {})
        kind, message, _ = _explained(str(failure.value), 2, tmp_path)
        assert (kind, message) == ("failed", "a rank died, exit code -11")
        pool.run(1, f"{__name__}:{die_on_rank_1.__name__}", {})
    finally:
        pool.close()


def test_slices_of_consecutive_commits_cover_every_case() -> None:
    cases = [Case(f"own/none/{number}", nn.Identity, features(2), mean_square) for number in range(40)]
    slices = [slice_of(cases, 77 + commit) for commit in range(CASES_PER_CHOSEN)]
    assert sum(len(each) for each in slices) == 2 * len(cases)
    assert {case.name for each in slices for case, _ in each} == {case.name for case in cases}
    assert all(variant == "3" for each in slices for _, variant in each[::2])
