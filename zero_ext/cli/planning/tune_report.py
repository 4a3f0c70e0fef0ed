"""A tuning as lines, as a table and as JSON."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zero_ext.plan.tune import TrialResult, Tuning

_SHOWN_REASON = 90


def line(one: TrialResult) -> str:
    """Return a trial as it ended."""
    outcome = one.outcome
    if outcome.fate == "measured":
        return f"{escape(str(one.point))}: {outcome.samples_per_second:,.4g} samples/s"
    fate = outcome.fate if one.tried else "left out"
    return f"[dim]{escape(str(one.point))}: {fate}, {escape(outcome.reason)}"


def print_tuning(console: Console, tuning: Tuning) -> None:
    """Every point that was looked at, the fastest first."""
    table = Table("stage", "placement", "micro-batch", "units", "aio", "samples/s", "of best", "seconds")
    best = tuning.best
    top = best.outcome.samples_per_second if best is not None else 1.0
    for one in sorted(tuning.measured, key=lambda one: -one.outcome.samples_per_second):
        point, outcome = one.point, one.outcome
        measured = outcome.fate == "measured"
        fate = outcome.fate if one.tried else "left out"
        table.add_row(
            str(point.placement.stage),
            escape(point.placement.label),
            str(point.micro_batch),
            f"{point.unit_elements:,}",
            " ".join(str(value) for _, value in point.aio),
            f"{outcome.samples_per_second:,.4g}"
            if measured
            else f"{fate}: {escape(outcome.reason[:_SHOWN_REASON])}",
            f"{outcome.samples_per_second / top:.0%}" if measured else "",
            f"{outcome.seconds:.1f}" if one.tried else "",
            style="bold green" if one is best else "" if measured else "dim",
        )
    console.print(table)
    points = sum(1 for _ in tuning.space)
    console.print(f"{tuning.trials} trials of {points} points")


def tuning_as_json(tuning: Tuning) -> dict[str, Any]:
    """Return every point with what became of it."""
    best = tuning.best
    return {
        "points": sum(1 for _ in tuning.space),
        "trials": tuning.trials,
        "best": None if best is None else _as_json(best),
        "measured": [_as_json(one) for one in tuning.measured],
    }


def why_none(tuning: Tuning) -> str:
    """Return what happened most often."""
    reasons = Counter(f"{one.outcome.fate}: {one.outcome.reason}" for one in tuning.measured)
    return reasons.most_common(1)[0][0] if reasons else "there was nothing to try"


def _as_json(one: TrialResult) -> dict[str, Any]:
    point, outcome = one.point, one.outcome
    return {
        **point.placement.options,
        "micro_batch": point.micro_batch,
        "unit_elements": point.unit_elements,
        "aio": dict(point.aio),
        "tried": one.tried,
        "fate": outcome.fate,
        "samples_per_second": outcome.samples_per_second,
        "reason": outcome.reason,
        "seconds": outcome.seconds,
    }
