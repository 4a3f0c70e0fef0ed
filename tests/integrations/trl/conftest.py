"""Ranks that share the packages of these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.multi.pool import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Replaces the pool of the other tests: a Trainer takes all ranks of the default group."""
    pool = RankPool(2, preload=("trl", "tests.integrations.trl.data"))
    yield pool
    pool.close()
