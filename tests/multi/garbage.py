"""Garbage collection in processes that run one test after another."""

from __future__ import annotations

import gc

_MANY = 10_000


def collect_garbage() -> None:
    """Collect, and leave many objects that are still in use out of later collections.

    A collection looks at every object. Modules and collected tests have a million, which stay for good: half
    a second for each of 500 test modules.
    """
    gc.collect()
    if len(gc.get_objects()) > _MANY:
        gc.freeze()
