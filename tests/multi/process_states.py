"""States of processes that others started."""

from __future__ import annotations

import time
from pathlib import Path


def reaches(pid: int, states: str) -> bool:
    """Whether a process comes to one of these states, as /proc names them; "X" if it has ended."""
    state, deadline = "", time.monotonic() + 60
    while state not in states or not state:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
        except (FileNotFoundError, ProcessLookupError):
            state = "X"
    return True
