"""One JSON object a line, for programs."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path

from zero_ext.monitor.metric_row import Row
from zero_ext.monitor.writers.append_file import LineFile


class JsonLines:
    """Append each row as one JSON object with the time of day ("time", seconds since 1970).

    What is unknown is null. Numbers that JSON does not have are the strings "NaN", "Infinity", "-Infinity".
    An existing file is continued.

    Args:
        path: the file.

    Raises:
        OSError: the file cannot be opened. Later calls raise it where writing fails.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = LineFile(path)

    def write(self, row: Row) -> None:
        """Write the values of a step.

        Args:
            row: values by name; None means unknown.
        """
        self.write_object({"time": round(time.time(), 3), **row})

    def write_object(self, values: Mapping[str, object]) -> None:
        """Append any object of numbers, strings and lists of them.

        Args:
            values: by name.
        """
        plain = {name: _plain(value) for name, value in values.items()}
        self._file.write(json.dumps(plain, allow_nan=False))

    def close(self) -> None:
        """Close the file. Later rows raise `ValueError`."""
        self._file.close()


def _plain(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return value
