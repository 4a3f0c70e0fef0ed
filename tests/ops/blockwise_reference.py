"""Dynamic codes and block-wise scales in float64, from their definition."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

BLOCK = 256


def code_values(signed: bool) -> Values:
    """The 256 values in order: the middles of the cells of seven decades, zero and one."""
    values = [0.0, 1.0]
    for zeros in range(7):
        cells = 2 ** ((6 if signed else 7) - zeros)
        edges = np.linspace(0.1, 1.0, cells + 1) * 10.0**-zeros
        middles = (edges[:-1] + edges[1:]) / 2
        values += [*middles, *-middles] if signed else [*middles]
    return np.sort(np.array(values))


def over_elements(scales: Values, count: int) -> Values:
    """Every element's scale."""
    return np.repeat(scales, BLOCK)[:count]


def encode_scales(values: Values) -> Values:
    """Every block's element of largest magnitude, the positive one of two."""
    blocks = [values[start : start + BLOCK] for start in range(0, len(values), BLOCK)]
    return np.array([max(block, key=lambda x: (abs(x), x)) for block in blocks], dtype=np.float64)


def decode(codes: NDArray[np.uint8], scales: Values, signed: bool) -> Values:
    return code_values(signed)[codes] * over_elements(scales, len(codes))


def allowed_error(values: Values, scales: Values, signed: bool) -> Values:
    """Half the gap between the two code values around each element, times the scale, plus rounding.

    At the ends there is one neighbor only: the smallest signed value is not -1. Below the smallest positive
    value the unsigned code rounds up, by at most that value.
    """
    table = code_values(signed)
    scale = over_elements(scales, len(values))
    position = np.divide(values, scale, out=np.zeros_like(values), where=scale != 0)
    above = np.clip(np.searchsorted(table, position), 1, 255)
    half_gap = (table[above] - table[above - 1]) / 2
    half_gap = np.maximum(half_gap, table[0] - position)
    if not signed:
        half_gap = np.where((position > 0) & (position < table[1]), table[1], half_gap)
    return half_gap * np.abs(scale) * (1 + 2**-12) + 4e-7 * np.abs(values)
