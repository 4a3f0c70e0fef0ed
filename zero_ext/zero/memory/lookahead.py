"""When units are gathered ahead and reused: rules for the engine, memory plans and simulated steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

U = TypeVar("U", bound=Hashable)


def look_ahead(
    expected: Iterable[U], numel: Callable[[U], int], is_stored: Callable[[U], bool], limit: int
) -> Iterator[U]:
    """Yield the units to gather ahead, nearest first.

    ``expected`` are the units that are needed next and not gathered. The next one is always gathered ahead,
    and further ones while all that is ahead stays within ``limit`` elements. A shard on NVMe (``is_stored``)
    is read before it is gathered, so two such units are always ahead. With ``limit`` 0 none is.
    """
    ahead, seen = 0, set[U]()
    for unit in expected if limit else ():
        if unit in seen:
            continue
        ahead += numel(unit)
        if ahead > limit and len(seen) >= (2 if is_stored(unit) else 1):
            return
        seen.add(unit)
        yield unit


def is_reused(unit: U, expected: Iterable[U], numel: Callable[[U], int], limit: int) -> bool:
    """Return whether ``unit`` is needed again before more than ``limit`` elements are used."""
    used = 0
    for other in expected if limit else ():
        if other is unit:
            return True
        used += numel(other)
        if used > limit:
            break
    return False
