"""One CSV row a step, for plots and spreadsheets."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from zero_ext.config.events import Event, StepEnd
from zero_ext.monitor.metric_row import Row, Value, facts_of
from zero_ext.monitor.writers.append_file import LineFile

COLUMNS = ("step", "loss", "grad_norm", "lr", "skipped", "loss_scale", "seconds")


class CsvFile:
    """Append each step to a CSV file, complete to the last row at any time.

    As a subscriber it writes the columns step, loss, grad_norm (both empty when unknown), lr (one per param
    group, separated by spaces), skipped (0 or 1), loss_scale, seconds. As a monitor's writer it also writes
    whatever else a row has. Columns that come up later are added to the whole file. An existing file is
    continued, so a resumed run keeps one file. Use it on one rank, as a context manager or with `close`.

    Args:
        path: the file.

    Attributes:
        path: as given.

    Raises:
        ValueError: an existing file has other columns.
        OSError: the file cannot be opened. Later calls raise it where writing fails.

    Examples:
        >>> from zero_ext.monitor import CsvFile
        >>> with CsvFile("steps.csv") as file:
        ...     file.write({"step": 1, "loss": 2.5})
        >>> print(file.path.read_text(), end="")
        step,loss,grad_norm,lr,skipped,loss_scale,seconds
        1,2.5,,,,,
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = LineFile(path)
        header = self._file.first_line()
        self._columns = next(csv.reader([header])) if header else list(COLUMNS)
        if self._columns[: len(COLUMNS)] != list(COLUMNS):
            self._file.close()
            raise ValueError(
                f"{self.path}: expected a file that begins with the columns {','.join(COLUMNS)}, "
                f"got {header[:80]!r}. Give another path."
            )
        if not header:
            self._file.write(_line(self._columns))

    def __call__(self, event: Event) -> None:
        """Write a `StepEnd`; other events are ignored.

        Args:
            event: any event of an engine.
        """
        if isinstance(event, StepEnd):
            self.write(facts_of(event))

    def write(self, row: Row) -> None:
        """Write the values of a step.

        Args:
            row: values by name; None means unknown.
        """
        new = [name for name in row if name not in self._columns]
        if new and not self._file.closed:
            self._widen(new)
        self._file.write(_line([_cell(row.get(name)) for name in self._columns]))

    def close(self) -> None:
        """Close the file. Later events raise `ValueError`."""
        self._file.close()

    def __enter__(self) -> CsvFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _widen(self, names: Sequence[str]) -> None:
        """Add columns, empty in the rows so far: a new file takes the old one's place."""
        self._file.close()
        self._columns += names
        temporary = self.path.with_name(f".{self.path.name}.new")
        with (
            self.path.open(newline="", encoding="utf-8") as old,
            temporary.open("w", encoding="utf-8") as new,
        ):
            for number, cells in enumerate(csv.reader(old)):
                wider = self._columns if not number else cells + [""] * len(names)
                new.write(_line(wider) + "\n")
            new.flush()
            os.fsync(new.fileno())
        temporary.replace(self.path)
        self._file = LineFile(self.path)


def _line(cells: Sequence[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(cells)
    return text.getvalue()


def _cell(value: Value) -> object:
    return " ".join(repr(one) for one in value) if isinstance(value, tuple) else value
