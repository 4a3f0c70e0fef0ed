"""The part of the zoo that runs in every test session: it changes with the commit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.multi.turns import commit_number
from tests.zoo.case import Case
from tests.zoo.catalog import cases_of
from tests.zoo.comparison import Comparison

# One case in so many is in a slice. On average as many commits run all of them once.
CASES_PER_CHOSEN = 4
MAIN_VARIANT = "3"
OTHER_VARIANTS = ("nvme", "2", "init", "checkpoint", "0", "1")


def slice_of(cases: list[Case], number: int) -> list[tuple[Case, str]]:
    """Return the chosen cases, each in stage 3 and in one other variant."""
    chosen: list[tuple[Case, str]] = []
    for case in cases:
        rotation = number + int(hashlib.sha256(case.name.encode()).hexdigest(), 16)
        if rotation % CASES_PER_CHOSEN:
            continue
        others = [variant for variant in OTHER_VARIANTS if variant in case.variants]
        chosen += [(case, MAIN_VARIANT)] if MAIN_VARIANT in case.variants else []
        chosen += [(case, others[rotation // CASES_PER_CHOSEN % len(others)])] if others else []
    return chosen


def parameters(modules: list[str]) -> list[Any]:
    """Return the slice of the cases of ``modules`` as parameters of a test."""
    number = commit_number()
    return [
        pytest.param(case, variant, id=f"{case.name}-{variant}")
        for case, variant in slice_of(cases_of(modules), number)
    ]


def comparisons() -> Iterator[Comparison]:
    """Yield a pool of ranks for a fixture and end it afterwards."""
    print(f"zoo: slice of commit number {commit_number():x}")
    comparison = Comparison()
    yield comparison
    comparison.close()


def check(comparison: Comparison, case: Case, variant: str) -> None:
    """Fail unless the variant of the case comes out as the case expects."""
    outcome = comparison.outcome(case, variant)
    if not outcome.passed:
        pytest.fail(
            f"{case.name} [{variant}], slice of commit {commit_number():x}: {outcome.kind}, expected "
            f"{case.expectation(variant)!r}\n{outcome.detail}\n{outcome.tail}",
            pytrace=False,
        )
