"""Sizes, rates and counts as people write them."""

from __future__ import annotations

import random

import pytest

from zero_ext.plan.parse_sizes import bytes_of, count_of, rate_of, short_bytes, short_number, size_text


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("80GB", 80 * 10**9),
        (" 1.5 tb ", 1.5e12),
        ("4TiB", 4 << 40),
        ("0", 0),
        ("512", 512),
        ("28TB", 28e12),
        ("1e9", 10**9),
        ("2.5KiB", 2560),
    ],
)
def test_sizes(text: str, nbytes: float) -> None:
    assert bytes_of(text, "--size") == nbytes


@pytest.mark.parametrize(
    "text", ["", "GB", "-1GB", "1 apple", "1..5GB", "nan", "inf", "9e99", "1e99999", "5EB5", "٣GB5"]
)
def test_what_is_no_size_is_refused_by_its_option(text: str) -> None:
    with pytest.raises(ValueError, match="--gpu-memory: expected bytes, got "):
        bytes_of(text, "--gpu-memory")


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("25GB/s", 25e9),
        ("200Gbit/s", 25e9),
        ("800 gbps", 100e9),
        ("3e9", 3e9),
        ("100Mbit/s", 12.5e6),
        ("1GiB/s", 1 << 30),
    ],
)
def test_rates(text: str, rate: float) -> None:
    assert rate_of(text, "--link-bandwidth") == rate


@pytest.mark.parametrize("text", ["0", "fast", "5 Gbit/h", "bit/s", "-3GB/s"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"--link-bandwidth: expected bytes per second, got .*25GB/s"):
        rate_of(text, "--link-bandwidth")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("7.5B", 7_500_000_000),
        ("350m", 350_000_000),
        ("1T", 10**12),
        ("1000", 1000),
        ("0", None),
        ("x", None),
    ],
)
def test_counts(text: str, count: int | None) -> None:
    assert count_of(text) == count


def test_short_texts_keep_three_digits() -> None:
    assert short_bytes(14_375_000_000) == "14.4 GB"
    assert short_bytes(5_000_000_000) == "5.00 GB"
    assert short_bytes(999_600_000) == "1.00 GB"
    assert short_bytes(12) == "12 B"
    assert short_number(7_500_000_000, ("", "K", "M", "B", "T")) == "7.50 B"
    assert size_text(3 << 20) == "3 MiB"


def test_a_short_text_reads_back_to_three_digits() -> None:
    seed = random.randrange(10**9)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(300):
        nbytes = round(10 ** draw.uniform(0, 17))
        assert bytes_of(short_bytes(nbytes), "") == pytest.approx(nbytes, rel=0.0051)
