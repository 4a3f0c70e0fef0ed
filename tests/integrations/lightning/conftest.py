"""Worlds of exactly the wanted size: Lightning takes all ranks of the default group."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.multi.worlds import Worlds


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Worlds]:
    """Replaces the pool of the other tests."""
    worlds = Worlds()
    yield worlds
    worlds.close()
