"""The memory of a process, and the bytes of files on their device."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path


def resident_bytes() -> int:
    """Return the resident set size of this process.

    Returns:
        Bytes; on systems that do not report it, the largest size so far.
    """
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def file_bytes(folder: Path) -> int:
    """Return the bytes that files below `folder` take on their device, also while files come and go.

    Args:
        folder: the folder.

    Returns:
        Bytes.
    """
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:  # removed meanwhile
            continue
    return total
