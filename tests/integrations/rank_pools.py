"""The pools of ranks that folders of these tests have in place of that of the other tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.multi.pool import RankPool
from tests.multi.worlds import Worlds


def pool_fixture(make: Callable[[], RankPool | Worlds]) -> Any:
    """A fixture of the session for ``rank_pool``."""

    @pytest.fixture(scope="session", name="rank_pool")
    def rank_pool() -> Iterator[RankPool | Worlds]:
        pool = make()
        yield pool
        pool.close()

    return rank_pool
