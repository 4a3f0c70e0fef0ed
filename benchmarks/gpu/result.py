"""What a benchmark prints: one line of JSON, again and again as more is known; the last one counts."""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from scripts.gpu_check.step import Bar


class Budget:
    """Seconds that a benchmark may take, from its start."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds that are left."""
        return self._end - time.monotonic()


@dataclass
class Result:
    """Tables, bars and raw figures of one benchmark, growing while it runs."""

    tables: list[dict[str, Any]] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    line: str = ""
    failures: list[str] = field(default_factory=list)

    def table(self, title: str, columns: Sequence[str], note: str = "") -> list[list[str]]:
        """Begins a table; its rows are to be filled in."""
        rows: list[list[str]] = []
        self.tables.append({"title": title, "columns": list(columns), "rows": rows, "note": note})
        return rows

    def report(self) -> None:
        """Prints everything that is known so far."""
        print(json.dumps({**asdict(self), "bars": [asdict(bar) for bar in self.bars]}), flush=True)

    @contextmanager
    def attempt(self, what: str, own: bool) -> Iterator[None]:
        """A part that may fail without ending the rest: a failure of our `own`, a peer is only left out."""
        failed = False
        try:
            yield
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            traceback.print_exc()
            (self.failures if own else self.left_out).append(f"{what}: {type(error).__name__}: {lines[0]}")
            failed = True
        if failed:
            gc.collect()  # what a traceback held

    def finish(self) -> None:
        """The last line; ends the program with an error if something of our own failed."""
        if self.failures:
            self.line = "; ".join(self.failures)
        self.report()
        for failure in self.failures:
            print(f"FAILED {failure}", file=sys.stderr)
        if self.failures:
            sys.exit(1)


@dataclass(frozen=True)
class Times:
    """Seconds of one contender, a value a round."""

    seconds: list[float]

    @property
    def median(self) -> float:
        return median(self.seconds)

    def milliseconds(self) -> str:
        """Median and range."""
        low, high = min(self.seconds), max(self.seconds)
        return f"{1e3 * self.median:.3f} ({1e3 * low:.3f}–{1e3 * high:.3f})"

    def rate(self, nbytes: float) -> float:
        """Bytes a second at the median."""
        return nbytes / self.median

    def against(self, other: Times) -> float:
        """How many times longer `other` takes: the median of the rounds' ratios."""
        return median(theirs / mine for mine, theirs in zip(self.seconds, other.seconds, strict=True))
