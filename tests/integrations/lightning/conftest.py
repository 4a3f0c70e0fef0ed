"""Worlds of exactly the wanted size: Lightning takes all ranks of the default group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.multi.pool import RankPool


class Worlds:
    """A pool of ranks for each world size, started at first use."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def run(self, world_size: int, *arguments: Any, **options: Any) -> list[Any]:
        """See :meth:`RankPool.run`; the default group has ``world_size`` ranks."""
        if world_size not in self._pools:
            self._pools[world_size] = RankPool(world_size)
        return self._pools[world_size].run(world_size, *arguments, **options)

    def close(self) -> None:
        """Ends all ranks."""
        for pool in self._pools.values():
            pool.close()


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Worlds]:
    """Replaces the pool of the other tests."""
    worlds = Worlds()
    yield worlds
    worlds.close()
