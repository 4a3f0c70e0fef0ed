"""Checks of numbers in a configuration."""

from __future__ import annotations

import math

from typing_extensions import TypeIs


def is_number(value: object) -> TypeIs[int | float]:
    """Return whether `value` is a finite int or float that a float64 can hold. A bool is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond float64
        return False
