"""Stages of a pipeline against every way to cut the layers."""

from __future__ import annotations

import math
import random
from itertools import combinations, pairwise

import pytest

from zero_ext.parallel.pipeline.stage_module import split_stages


def every_cut(weights: list[float], stages: int) -> list[list[range]]:
    inner = combinations(range(1, len(weights)), stages - 1)
    return [[range(a, b) for a, b in pairwise((0, *cuts, len(weights)))] for cuts in inner]


def heaviest(weights: list[float], split: list[range]) -> float:
    return max(sum(weights[layer] for layer in stage) for stage in split)


def test_no_cut_has_a_lighter_heaviest_stage() -> None:
    for _ in range(200):
        layers = random.randint(1, 9)
        stages = random.randint(1, layers)
        weights = [random.choice((0.0, 1.0, 2.0, random.expovariate(0.5))) for _ in range(layers)]
        found = split_stages(weights, stages)
        assert [layer for stage in found for layer in stage] == list(range(layers))
        assert len(found) == stages and all(found)
        least = min(heaviest(weights, cut) for cut in every_cut(weights, stages))
        assert heaviest(weights, found) == pytest.approx(least, rel=1e-12)


def test_equal_layers_are_shared_out_evenly() -> None:
    assert sorted(len(stage) for stage in split_stages([1.0] * 10, 4)) == [2, 2, 3, 3]


def test_a_heavy_embedding_stands_alone() -> None:
    assert split_stages([9.0, 1.0, 1.0, 1.0], 2) == [range(1), range(1, 4)]


@pytest.mark.parametrize(
    ("weights", "stages", "named"),
    [
        ([1.0, 1.0], 3, "pipeline stages: expected at most 2, .* got 3"),
        ([1.0], 0, "pipeline stages: expected at least 1, got 0"),
        ([1.0, -1.0], 2, r"weight of layer 1: .* got -1\.0"),
        ([math.nan, 1.0], 2, "weight of layer 0: .* got nan"),
        ([1.0, math.inf], 1, "weight of layer 1: .* got inf"),
    ],
)
def test_what_cannot_be_cut_is_refused(weights: list[float], stages: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        split_stages(weights, stages)
