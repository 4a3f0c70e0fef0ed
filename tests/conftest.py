"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.multi.pool import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """The ranks of this pytest session: processes that every multi-rank test reuses."""
    pool = RankPool()
    yield pool
    pool.close()
