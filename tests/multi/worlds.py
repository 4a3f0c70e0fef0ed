"""Worlds of exactly the wanted size, for what takes all ranks of the default group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.multi.pool import RankPool

# Third-party libraries start slowly, and on a loaded machine by a multiple: it only ends what hangs.
SHORTEST_LIMIT = 400.0


class Worlds:
    """A pool of ranks for each world size, started at first use; ``preload`` as :class:`RankPool` has it."""

    def __init__(self, preload: Sequence[str] = ()) -> None:
        self._preload = preload
        self._pools: dict[int, RankPool] = {}

    def run(self, world_size: int, *arguments: Any, **options: Any) -> list[Any]:
        """See :meth:`RankPool.run`; the default group has ``world_size`` ranks, and at least
        ``SHORTEST_LIMIT`` seconds."""
        if world_size not in self._pools:
            self._pools[world_size] = RankPool(world_size, preload=self._preload)
        options["timeout"] = max(SHORTEST_LIMIT, options.get("timeout", 0.0))
        return self._pools[world_size].run(world_size, *arguments, **options)

    def close(self) -> None:
        """Ends all ranks."""
        for pool in self._pools.values():
            pool.close()
