"""Worlds of exactly the wanted size, for what takes all ranks of the default group."""

from __future__ import annotations

from typing import Any

from tests.multi.pool import RankPool


class Worlds:
    """A pool of ranks for each world size, started at first use; other arguments as in :class:`RankPool`."""

    def __init__(self, stand_in: bool = False, backend: str = "gloo") -> None:
        self._stand_in = stand_in
        self._backend = backend
        self._pools: dict[int, RankPool] = {}

    def run(
        self,
        world_size: int,
        target: str,
        arguments: dict[str, Any],
        seed: int | None = None,
    ) -> list[Any]:
        """See :meth:`RankPool.run`; the default group has ``world_size`` ranks."""
        if world_size not in self._pools:
            self._pools[world_size] = RankPool(world_size, self._stand_in, self._backend)
        return self._pools[world_size].run(world_size, target, arguments, seed=seed)

    def close(self) -> None:
        """Ends all ranks."""
        for pool in self._pools.values():
            pool.close()
