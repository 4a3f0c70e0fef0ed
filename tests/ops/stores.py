"""Stores for the tests of ops that need one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ALIGNMENT = 4096
STORE_BYTES = 16 << 20


@contextmanager
def open_store(folder: Path) -> Iterator[int]:
    """The handle of an open store of STORE_BYTES on a file in `folder`."""
    yield 0
