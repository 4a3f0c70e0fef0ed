"""Counts of the work on hot paths against their baseline, as timings never decide a test.

Run from the repository root: python -m scripts.work_counts [--write]
"""

from __future__ import annotations

from typing import Annotated

import typer

from scripts.work_counts import baseline
from scripts.work_counts.measure import measured_counts


def main(
    write: Annotated[bool, typer.Option("--write", help="Write the baseline anew.")] = False,
) -> None:
    """Compare the counts with the baseline, or write it; status 1 for a difference beyond the tolerance."""
    counts = measured_counts()
    if write:
        baseline.write(counts)
        print(f"wrote {baseline.FILE}")
        return
    exceeding, report = baseline.judge(counts)
    print(report)
    if exceeding:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
