"""How much Python a call runs: what tells growing work apart from a slow machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def count_opcodes(function: Callable[[], object], folder: str = "") -> int:
    """Opcodes that ``function`` executes in this thread, in all that it calls; C code counts one a call.

    With a ``folder`` only those of code in files under it.
    """
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(folder):
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count
