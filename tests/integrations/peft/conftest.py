"""A pool of ranks that share the packages of these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.multi.pool import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Replaces the pool of the other tests."""
    pool = RankPool(2, preload=("peft", "tests.integrations.peft.models"))
    yield pool
    pool.close()
