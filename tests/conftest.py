"""Fixtures shared by all tests."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.multi.garbage import collect_garbage
from tests.multi.pool import RankPool
from tests.multi.turns import EVERY_TURN, leave_out_of_turn

STAND_IN_RANKS = 3

# Whether examples are made in time, and how many are thrown away, depends on the machine and on luck.
settings.register_profile(
    "any machine",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let everything run, whatever the commit."""
    parser.addoption(EVERY_TURN, action="store_true", help="run all cases of families that take turns")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the next commits run."""
    leave_out_of_turn(config, items)


@pytest.fixture(scope="module", autouse=True)
def no_garbage_of_other_modules() -> None:
    """What earlier tests left in cycles must not be freed while a test measures memory."""
    collect_garbage()


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """The ranks of this pytest session: processes that every multi-rank test reuses."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def stand_in_pool() -> Iterator[RankPool]:
    """Ranks with the stand-in accelerator: processes apart, because a process that has it keeps it."""
    pool = RankPool(STAND_IN_RANKS, stand_in=True)
    yield pool
    pool.close()


@pytest.fixture
def generator() -> torch.Generator:
    """A freshly seeded generator; pytest shows the seed when the test fails."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)
