"""Files of a run that are complete to the last line at any time: CSV, JSON lines, a log of collectives."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zero_ext.config.events import CollectiveEnd, Event, StepEnd
from zero_ext.monitor.sources import FACTS, Row, Value, facts_of

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


def write_atomically(path: Path, chunks: Iterable[bytes]) -> None:
    """Write ``chunks`` to ``path``, which is there afterwards as a whole, or as it was."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("wb") as file:
        file.writelines(chunks)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


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
        self._columns = next(csv.reader([header])) if header else list(FACTS)
        if self._columns[: len(FACTS)] != list(FACTS):
            self._file.close()
            raise ValueError(
                f"{self.path}: expected a file that begins with the columns {','.join(FACTS)}, "
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
            self._file.close()
            write_atomically(self.path, self._widened(new))
            self._columns += new
            self._file = LineFile(self.path)
        self._file.write(_line([_cell(row.get(name)) for name in self._columns]))

    def close(self) -> None:
        """Close the file. Later events raise `ValueError`."""
        self._file.close()

    def __enter__(self) -> CsvFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _widened(self, names: Sequence[str]) -> Iterator[bytes]:
        """Yield the lines so far with more columns, which are empty in them."""
        with self.path.open(newline="", encoding="utf-8") as old:
            for number, cells in enumerate(csv.reader(old)):
                more = [""] * len(names) if number else names
                yield _line([*cells, *more]).encode() + b"\n"


def _line(cells: Sequence[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(cells)
    return text.getvalue()


def _cell(value: Value) -> object:
    return " ".join(map(repr, value)) if isinstance(value, tuple) else value


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
    return [_plain(one) for one in value] if isinstance(value, tuple | list) else value


@dataclass
class CommsTotals:
    """The sums of collectives of one kind over a group of ``ranks``, in one step or in all.

    ``elements`` are those of the full buffers, ``bytes_sent`` this rank's, ``seconds`` those that the host
    waited.
    """

    kind: str
    ranks: int
    collectives: int = 0
    elements: int = 0
    bytes_sent: int = 0
    seconds: float = 0.0


class CommsLog:
    """Write a line of JSON for each kind of collective and group at the end of every step.

    A subscriber: give it to [`subscribe`][zero_ext.monitor.subscribe]. A line has step, kind, ranks,
    collectives, elements, bytes_sent, seconds. Use it on one rank, or on each with a file of its own.

    Args:
        path: the file, which is continued if it exists.

    Raises:
        OSError: the file cannot be opened. Later calls raise it where writing fails.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = JsonLines(path)
        self._step: dict[tuple[str, int], CommsTotals] = {}
        self._all: dict[tuple[str, int], CommsTotals] = {}

    @property
    def totals(self) -> Sequence[CommsTotals]:
        """Sum over all steps so far, by kind and group."""
        return tuple(self._all.values())

    def __call__(self, event: Event) -> None:
        """Count a collective, or write the lines of a step.

        Args:
            event: any event of an engine.
        """
        if isinstance(event, CollectiveEnd):
            _add(
                self._step,
                CommsTotals(event.kind, event.ranks, 1, event.elements, event.bytes_sent, event.seconds),
            )
        elif isinstance(event, StepEnd):
            step, self._step = self._step, {}
            for counted in step.values():
                _add(self._all, counted)
                self._file.write_object({"step": event.step, **vars(counted)})

    def table(self) -> str:
        """Return the totals as text.

        Returns:
            A line for each kind and group, below a heading.
        """
        lines = [f"{'collective':<26}{'ranks':>6}{'count':>9}{'sent':>12}{'waited':>11}"]
        lines += [
            f"{each.kind:<26}{each.ranks:>6}{each.collectives:>9}"
            f"{each.bytes_sent / 2**20:>8.1f} MiB{each.seconds:>9.3f} s"
            for each in self._all.values()
        ]
        return "\n".join(lines)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _add(totals: dict[tuple[str, int], CommsTotals], more: CommsTotals) -> None:
    total = totals.setdefault((more.kind, more.ranks), CommsTotals(more.kind, more.ranks))
    total.collectives += more.collectives
    total.elements += more.elements
    total.bytes_sent += more.bytes_sent
    total.seconds += more.seconds
