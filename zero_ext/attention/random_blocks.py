"""Random blocks of a layout: a function of seed, head and row alone, so that every rank draws the same."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def random_columns(rows: Integers, available: Integers, count: int, seed: int, head: int) -> Integers:
    """`count` distinct columns below `available` for each of `rows`, uniformly; -1 where there are fewer.

    Floyd's sampling (Bentley and Floyd, CACM 30(9), 1987), with SplitMix64 (Steele et al., OOPSLA 2014) as
    a counter-based generator: the columns of a row depend on its number, on `available` of it, on `seed` and
    on `head` alone. Shape [rows, count].
    """
    chosen = np.full((rows.shape[0], count), -1, dtype=np.int64)
    stream = _mixed(np.array([seed], dtype=np.uint64) + _GOLDEN * np.array([head + 1], dtype=np.uint64))
    key = _mixed(stream + _GOLDEN * (rows.astype(np.uint64) + np.uint64(1)))
    for draw in range(count):
        top = available - np.minimum(available, count) + draw  # the largest that this draw may give
        words = _mixed(key + _GOLDEN * np.array([draw + 1], dtype=np.uint64))
        drawn = _below(words, np.maximum(top, 0) + 1)
        repeated = (chosen[:, :draw] == drawn[:, None]).any(axis=1)
        chosen[:, draw] = np.where(top < available, np.where(repeated, top, drawn), -1)
    return chosen


def _mixed(state: Words) -> Words:
    for shift, factor in _MIX:
        state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
    return state ^ (state >> np.uint64(31))


def _below(words: Words, bound: Integers) -> Integers:
    """Numbers below `bound` from the high 32 bits; their odds differ by at most one part in 2**32 / bound."""
    return (((words >> np.uint64(32)) * bound.astype(np.uint64)) >> np.uint64(32)).astype(np.int64)
