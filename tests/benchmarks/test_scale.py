"""The benchmark of scale: costs of one rank over N, their fits and bars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import scale
from benchmarks.harness.formula import state_bytes
from benchmarks.harness.rank_cost_curve import COSTS, growth, slope
from benchmarks.harness.shapes import shape_named
from tests.benchmarks.conftest import Concluded

FIELDS = {key for _, keys, *_ in COSTS for key in keys}


def pretended(exponents: dict[str, float], ranks: int, is_simulated: bool) -> dict[str, Any]:
    costs: dict[str, Any] = {name: 1e6 * ranks ** exponents.get(name, 0.0) for name in FIELDS}
    identity = {"shape": "tiny", "stage": 3, "ranks": ranks, "is_simulated": is_simulated}
    return costs | identity | {"shard_bytes": 1e9 / ranks}


def test_a_slope_is_the_exponent_of_least_squares() -> None:
    sizes, seconds = [64, 256, 1024, 16384], [2.0, 3.1, 11.0, 90.0]
    expected = np.polyfit(np.log(sizes), np.log(seconds), 1)[0]
    assert slope(list(zip(sizes, seconds, strict=True))) == pytest.approx(expected)


def test_costs_without_values_at_two_sizes_have_no_slope() -> None:
    curve = [pretended({"messages": 1.0}, ranks, True) for ranks in (64, 256)] + [pretended({}, 8, False)]
    curve[0] |= {"load_seconds": None, "save_bytes": 0}
    found = {each.cost: each for each in growth(curve)}
    assert found.keys() == {name for name, *_ in COSTS} - {"plan load ms", "save MB"}
    assert found["messages"].slope == pytest.approx(1) and found["messages"].spread == pytest.approx(4)
    assert found["messages"].met is None and found["resident MB"].met is True


@pytest.mark.parametrize("grown", ["", "setup_opcodes", "resident_bytes", "object_bytes", "messages"])
def test_bars_are_missed_where_setup_or_memory_grow_by_more_than_a_tenth(
    grown: str, concluded: Concluded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    exponents = {grown: 0.05, "tensor_bytes": -0.01}  # 256**0.05 is 1.32
    monkeypatch.setattr(
        scale, "measure_simulated", lambda *arguments: pretended(exponents, arguments[2], True)
    )
    monkeypatch.setattr(scale, "measure_real", lambda *arguments: pretended(exponents, arguments[2], False))
    data, status = concluded(scale.main, "tiny", 64, "", "tiny", 3, "2,4", "64,16384")
    assert status == int(grown not in ("", "messages"))
    assert [(each["ranks"], each["is_simulated"]) for each in data["curve"]] == [
        (2, False),
        (4, False),
        (64, True),
        (16384, True),
    ]
    assert (tmp_path / "results" / "scale.png").stat().st_size > 1000


def test_a_rank_that_fails_is_named(concluded: Concluded, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> dict[str, Any]:
        raise RuntimeError("64 ranks failed")

    monkeypatch.setattr(scale, "measure_simulated", fail)
    monkeypatch.setattr(scale, "measure_real", lambda *arguments: pretended({}, arguments[2], False))
    data, status = concluded(scale.main, "tiny", 64, "", "tiny", 3, "2", "64")
    assert status == 1 and data["missed"] == ["64 ranks failed"] and data["growth"] == []


def test_costs_of_real_and_simulated_ranks(concluded: Concluded) -> None:
    """The random states of 3,400 ranks exceed the limit of a tensor in the manifest."""
    data, _ = concluded(scale.main, "tiny", 64, "", "tiny", 3, "2", "64,3400")
    real, few, many = data["curve"]
    for costs in data["curve"]:
        ranks = costs["ranks"]
        formula = sum(state_bytes(shape_named("tiny").parameters, 3, ranks).values())
        padding = 64 * 16 // 2 * 20  # bytes of a shard in 4 units, each padded to a multiple of 64 per kind
        assert formula <= costs["shard_bytes"] <= formula + padding
        # Each rank exchanges with all others, and nothing goes through a third.
        assert costs["collectives"] == few["collectives"] > 0
        assert costs["messages"] == costs["collectives"] * (ranks - 1)
        assert costs["bytes_sent"] > 0 and costs["manifest_bytes"] > 5056 * ranks
        assert costs["tensor_bytes"] > 0 and costs["object_bytes"] > 0 and costs["setup_seconds"] > 0
    assert many["setup_opcodes"] == pytest.approx(few["setup_opcodes"], rel=0.01)
    assert not real["is_simulated"] and few["is_simulated"]
    assert many["load_bytes"] > 5 * few["load_bytes"] > 0
