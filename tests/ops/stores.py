"""Stores for the tests of ops that need one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zero_ext import ops

ALIGNMENT = 4096
STORE_BYTES = 16 << 20
STORE = 0x5EED  # the handle


@contextmanager
def open_store(folder: Path) -> Iterator[int]:
    """The handle of a store on two files in `folder`, with one extent of STORE_BYTES at offset 0."""
    paths = [folder / "first", folder / "second"]
    ops.store_open(STORE, paths, "auto", (8, 1 << 16, 1), 1 << 18, True, False)
    try:
        ops.store_reserve(STORE, STORE_BYTES)
        if ops.store_allocate(STORE, STORE_BYTES) != 0:
            raise AssertionError("the first extent of a store begins at 0")
        yield STORE
    finally:
        ops.store_close(STORE)
