"""Opening files that others have put there: never a pipe or a device, which could keep the reader waiting."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from zero_ext.checkpoint.files.checkpoint_error import CheckpointError


def open_regular(path: Path) -> int:
    """Return a descriptor to read ``path`` with; OSError, or CheckpointError if it is no regular file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(
            f"{path}: it is not a regular file. Put a regular file there, or pass another path."
        )
    return descriptor


def read_limited(path: Path, limit: int) -> bytes:
    """Return the file's bytes, ``limit`` of them at most; errors are those of ``open_regular``."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read(limit)
