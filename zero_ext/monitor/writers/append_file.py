"""A text file that grows by whole lines, whatever happens to the process."""

from __future__ import annotations

import os
from pathlib import Path

_READ_BYTES = 1 << 16


class LineFile:
    """Appends lines, each handed to the system in one call: all lines but the last are always whole.

    An existing file is continued. The system may end a write between two pages when the process is
    killed; the start of a last line that this, or a crash of the machine, left is cut off. Raises
    ``OSError`` where writing fails.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self.closed = False
        os.ftruncate(self._file, self._complete_bytes())

    def first_line(self) -> str:
        """Return the first line without its end; empty while there is none."""
        return os.pread(self._file, _READ_BYTES, 0).decode("utf-8", "replace").partition("\n")[0]

    def write(self, line: str) -> None:
        """Append ``line``, which has no end of its own. Raises ``ValueError`` after :meth:`close`."""
        if self.closed:
            raise ValueError(f"{self.path}: the file is closed. Open another writer to write more.")
        data = line.encode() + b"\n"
        written = os.write(self._file, data)
        if written != len(data):
            os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            raise OSError(
                f"{self.path}: expected to write {len(data)} bytes, got {written} written. Free space on "
                "the disk."
            )

    def close(self) -> None:
        """Close the file; calling it again does nothing."""
        if not self.closed:
            self.closed = True
            os.close(self._file)

    def _complete_bytes(self) -> int:
        """Return bytes up to and with the last end of a line."""
        end = os.fstat(self._file).st_size
        while end:
            begin = max(0, end - _READ_BYTES)
            found = os.pread(self._file, end - begin, begin).rfind(b"\n")
            if found >= 0:
                return begin + found + 1
            end = begin
        return 0
