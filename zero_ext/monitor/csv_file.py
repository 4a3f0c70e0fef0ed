"""One CSV row a step, for plots and spreadsheets."""

from __future__ import annotations

import csv
from pathlib import Path
from types import TracebackType

from zero_ext.config.events import Event, StepEnd

COLUMNS = ("step", "loss", "grad_norm", "lr", "skipped", "loss_scale", "seconds")


class CsvFile:
    """Subscriber that appends each step to a CSV file, complete to the last row at any time.

    Columns: step, loss, grad_norm (both empty when unknown), lr (one per param group, separated by spaces),
    skipped (0 or 1), loss_scale, seconds. An existing file is continued, so a resumed run keeps one file.
    Use it on one rank, as a context manager or with `close`.

    Raises ValueError for an existing file with other columns, OSError where writing fails.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a+", newline="", encoding="utf-8", buffering=1)
        self._rows = csv.writer(self._file, lineterminator="\n")
        self._file.seek(0)
        header = self._file.readline(1000).rstrip("\n")
        if not header:
            self._rows.writerow(COLUMNS)
        elif header != ",".join(COLUMNS):
            self._file.close()
            raise ValueError(
                f"{self.path} begins with {header[:80]!r}, the columns {','.join(COLUMNS)} wanted; "
                "give another path"
            )

    def __call__(self, event: Event) -> None:
        """Writes a `StepEnd`; other events are not for this file."""
        if isinstance(event, StepEnd):
            lr = " ".join(repr(value) for value in event.lr)
            skipped = int(event.skipped)
            row = (event.step, event.loss, event.grad_norm, lr, skipped, event.loss_scale, event.seconds)
            self._rows.writerow(row)

    def close(self) -> None:
        """Closes the file; later events raise ValueError."""
        self._file.close()

    def __enter__(self) -> CsvFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
