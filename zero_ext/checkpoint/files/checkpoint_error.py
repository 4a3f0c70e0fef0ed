"""The error of a checkpoint that cannot be saved or loaded."""

from __future__ import annotations

import reprlib

MOST_BYTES = 2000
_GAP = " ... "
_TAIL_SHARE = 3


def shortened(text: str, most_bytes: int = MOST_BYTES) -> str:
    """Return `text` in at most `most_bytes` bytes of UTF-8: its beginning and its end, which says what to do.

    Names and values of a foreign file can be megabytes long.
    """
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= most_bytes:
        return data.decode()
    tail = most_bytes // _TAIL_SHARE
    head = most_bytes - tail - len(_GAP)
    return data[:head].decode("utf-8", "ignore") + _GAP + data[-tail:].decode("utf-8", "ignore")


def brief(value: object) -> str:
    """Return the beginning of ``repr(value)``, in time and memory that do not grow with the value."""
    return _brief.repr(value)


_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = _brief.maxlong = 77


class CheckpointError(RuntimeError):
    """A save or a load failed; the message names the rank, the file, what was seen and what to do.

    It is raised on every rank of the group, whichever rank met the problem.

    Args:
        text: the message; at most 2000 bytes of it are kept.
    """

    def __init__(self, text: str) -> None:
        super().__init__(shortened(text))
