"""The committed baseline, and how counts differ from it."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from scripts.work_counts.counting import OPCODES, OPERATIONS, UNITS, Counts

FILE = Path(__file__).with_name("baseline.json")
TOLERANCE = 0.03
WRITE = "python -m scripts.work_counts --write"
WHAT_TO_DO = (
    "Where the change is intended, write the baseline anew and commit it with the code:\n"
    f"    {WRITE}\n"
    "Otherwise find what the hot path does more, or no longer does, than before."
)


def versions() -> dict[str, str]:
    """What the counts depend on besides the code: minor versions of Python and torch."""
    python, pytorch = platform.python_version_tuple(), torch.__version__.split(".")
    return {"python": ".".join(python[:2]), "torch": ".".join(pytorch[:2])}


# Another Python compiles the same code to other opcodes, another torch runs other operations.
UNIT_DEPENDS_ON = {OPCODES: "python", OPERATIONS: "torch"}


@dataclass(frozen=True)
class Difference:
    """A count and its baseline; None where a side lacks the path."""

    path: str
    unit: str
    before: int | None
    now: int | None

    @property
    def exceeds(self) -> bool:
        """Whether they are further apart than the tolerance, upward or downward."""
        if self.before is None or self.now is None:
            return True
        return abs(self.now - self.before) > TOLERANCE * self.before

    @property
    def cells(self) -> tuple[str, str, str, str, str]:
        """Row of a table."""
        shown = ["none" if each is None else f"{each:,}" for each in (self.before, self.now)]
        if self.before and self.now is not None:
            change = f"{self.now / self.before - 1:+.1%}"
        else:
            change = "" if self.before == self.now else "new" if self.before in (None, 0) else "gone"
        return self.path, self.unit, *shown, change  # type: ignore[return-value]


def differences(
    baseline: Mapping[str, Mapping[str, int]], now: Mapping[str, Mapping[str, int]], units: tuple[str, ...]
) -> list[Difference]:
    """Pair the counts of all paths of both sides, in the baseline's order, in these units."""
    paths = [*baseline, *(path for path in now if path not in baseline)]
    pairs = ((path, baseline.get(path, {}), now.get(path, {})) for path in paths)
    return [
        Difference(path, unit, before.get(unit), after.get(unit))
        for path, before, after in pairs
        for unit in units
        if unit in before or unit in after
    ]


def compared_units(of_baseline: Mapping[str, str], own: Mapping[str, str]) -> tuple[str, ...]:
    """Units whose counts depend on no version that differs."""
    differing = {name for name, value in of_baseline.items() if own.get(name) != value}
    return tuple(unit for unit in UNITS if UNIT_DEPENDS_ON.get(unit) not in differing)


def table(rows: list[Difference]) -> str:
    """The rows as lines of columns under a heading."""
    lines = [("path", "unit", "baseline", "now", "change"), *(row.cells for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = (
        [cell.ljust(width) if index < 2 else cell.rjust(width) for index, (cell, width) in enumerate(cells)]
        for cells in (zip(line, widths, strict=True) for line in lines)
    )
    return "\n".join("  ".join(cells).rstrip() for cells in shown)


def write(counts: Mapping[str, Counts], file: Path = FILE) -> None:
    """Write the baseline, sorted by path."""
    text = json.dumps({"versions": versions(), "counts": dict(sorted(counts.items()))}, indent=2)
    file.write_text(text + "\n")


def read(file: Path = FILE) -> tuple[dict[str, str], dict[str, Counts]]:
    """The versions and counts of the baseline."""
    found = json.loads(file.read_text())
    return found["versions"], found["counts"]


def judge(counts: Mapping[str, Counts], file: Path = FILE) -> tuple[list[Difference], str]:
    """Compare counts with the baseline.

    Returns:
        The differences beyond the tolerance, and a report that ends with what to do about them, if any.
    """
    of_baseline, before = read(file)
    units = compared_units(of_baseline, versions())
    rows = differences(before, counts, units)
    exceeding = [row for row in rows if row.exceeds]
    left_out = [unit for unit in UNITS if unit not in units]
    lines = [table(exceeding or rows)]
    if left_out:
        lines.append(f"Not compared: {', '.join(left_out)}. The baseline is of {of_baseline}.")
    if exceeding:
        lines += [f"Counts of work differ from {file.name} by more than {TOLERANCE:.0%}.", WHAT_TO_DO]
    return exceeding, "\n".join(lines)
