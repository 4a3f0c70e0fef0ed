"""Sizes, rates and counts as people write them: ``80GB``, ``4TiB``, ``200Gbit/s``, ``7.5B``."""

from __future__ import annotations

import math
import re

SIZES = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGTP", 1)
    for suffix, base in (("B", 1000), ("IB", 1024))
}
COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
LARGEST = 2**62

_NUMBER = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(?:E\+?(\d{1,2}))?")


def bytes_of(text: str, option: str) -> int:
    """Return bytes of ``5GB``, ``500MiB`` or a bare number. ValueError naming ``option`` for anything
    else.
    """
    value = _scaled(text, SIZES)
    if value is None:
        raise ValueError(
            f"{option}: expected bytes, got {text!r}. Write a number, alone or with a unit from KB to PB or "
            "from KiB to PiB."
        )
    return int(value)


def rate_of(text: str, option: str) -> float:
    """Return bytes per second of ``25GB/s``, ``200Gbit/s`` or a bare number. ValueError naming ``option``."""
    rate = text.strip().upper().removesuffix("/S")
    bits = re.sub(r"(BITS?|BPS)$", "", rate)
    value = _scaled(rate, SIZES) if bits == rate else _scaled(bits, COUNTS | {"G": 10**9})
    if not value:
        raise ValueError(
            f"{option}: expected bytes per second, got {text!r}. Write a number, alone or like 25GB/s or "
            "200Gbit/s."
        )
    return value if bits == rate else value / 8


def count_of(text: str) -> int | None:
    """Return the whole number that ``7.5B``, ``350M`` or digits stand for; None for anything else and for
    zero.
    """
    value = _scaled(text, COUNTS)
    return round(value) if value is not None and value >= 1 else None


def size_text(nbytes: int) -> str:
    """Return bytes in the largest binary unit that divides them: 1048576 is ``1 MiB``."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes and nbytes % (1 << power) == 0:
            return f"{nbytes >> power} {unit}"
    return f"{nbytes} B"


def short_bytes(nbytes: float) -> str:
    """Return bytes with three digits in the decimal unit that fits: 14375000000 is ``14.4 GB``."""
    return short_number(nbytes, ("B", "kB", "MB", "GB", "TB", "PB", "EB"))


def short_number(value: float, units: tuple[str, ...]) -> str:
    """Return a number with three digits and the one of ``units`` that fits; each is a thousand times the one
    before."""
    power = 0
    while abs(value) >= 999.5 and power < len(units) - 1:
        value, power = value / 1000, power + 1
    decimals = 0 if abs(value) >= 99.95 or not power else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{decimals}f} {units[power]}".rstrip()


def _scaled(text: str, units: dict[str, int]) -> float | None:
    digits = text.strip().upper()
    number = _NUMBER.match(digits)
    unit = digits[number.end() :].strip() if number else ""
    if number is None or unit not in units:
        return None
    value = float(number[1]) * 10.0 ** int(number[2] or 0) * units[unit]
    return value if math.isfinite(value) and value <= LARGEST else None
