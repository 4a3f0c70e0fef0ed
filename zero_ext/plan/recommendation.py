"""Which placement to take, and why, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from zero_ext.config.parse_sizes import short_bytes
from zero_ext.plan.plan_entry import PlanEntry, activation_words
from zero_ext.plan.simulation.training_setup import ACTIVATIONS

Objective = Literal["memory", "speed"]
OBJECTIVES = ("memory", "speed")
ALIKE = 1.05  # placements whose speeds differ by less are taken for equally fast
SLOWEST = 2.0  # times the fastest step, that is the most that saving memory may cost


@dataclass(frozen=True)
class Recommendation:
    """The placement to take, and the reasons as sentences."""

    entry: PlanEntry
    reasons: tuple[str, ...]


def recommend(rows: Sequence[PlanEntry], objective: Objective) -> Recommendation | None:
    """The placement of ``rows`` that fits and serves the objective; None if none fits.

    ``speed``: the most tokens a second; among those within 5% of it the nearest tiers, then the least GPU
    memory. ``memory``: the least GPU memory among those at most half as fast as the fastest. Equal ones: the
    lower stage.
    """
    fitting = [row for row in rows if row.fits]
    if not fitting:
        return None
    fastest = max(fitting, key=lambda row: row.tokens_per_second)
    slack = ALIKE if objective == "speed" else SLOWEST
    near = [row for row in fitting if row.tokens_per_second * slack >= fastest.tokens_per_second]
    best = min(near, key=_by_speed if objective == "speed" else _by_memory)
    return Recommendation(best, tuple(_reasons(best, fastest, rows, near, objective)))


def _by_speed(row: PlanEntry) -> tuple[int, int, int, int]:
    saving = ACTIVATIONS.index(row.training.activations)
    return row.candidate.distance, saving, row.needs.total("device"), row.candidate.stage


def _by_memory(row: PlanEntry) -> tuple[int, int, int]:
    return row.needs.total("device"), row.candidate.distance, row.candidate.stage


def _reasons(
    best: PlanEntry,
    fastest: PlanEntry,
    rows: Sequence[PlanEntry],
    near: Sequence[PlanEntry],
    objective: Objective,
) -> list[str]:
    found = [_why_not_less(best, rows)] if best.candidate.stage or best.candidate.distance else []
    found = [reason for reason in found if reason]
    device = short_bytes(best.needs.total("device"))
    if objective == "memory":
        found.append(f"it needs the least memory of a GPU ({device}) at no more than twice the fastest step")
    elif best is fastest:
        found.append(f"no other that fits sees more tokens a second; it needs {device} of a GPU")
    else:
        share = best.tokens_per_second / fastest.tokens_per_second
        found.append(
            f"it is as fast as the fastest that fits ({fastest.candidate}) to within {1 - share:.1%}, and "
            f"{_advantage(best, fastest)}"
        )
    found += _about_traffic(best, rows, near)
    found.append(
        f"a step is bound by {best.step.busiest}; {activation_words(best.training.activations)}; "
        f"micro-batch {best.training.micro_batch}, {best.training.accumulation_steps} of them a step"
    )
    return found


def _why_not_less(best: PlanEntry, rows: Sequence[PlanEntry]) -> str:
    """The simpler placements that do not fit, with what they lack."""
    simpler = [
        row
        for row in rows
        if not row.fits
        and (row.candidate.distance, row.candidate.stage) < (best.candidate.distance, best.candidate.stage)
    ]
    if not simpler:
        return ""
    last = simpler[-1]
    lacks = ", ".join(
        f"{short_bytes(short.needed - short.available)} of {short.tier} memory" for short in last.shortfalls
    )
    others = f", and neither do {len(simpler) - 1} other simpler ones" if len(simpler) > 1 else ""
    return f"{last.candidate} does not fit (it lacks {lacks}){others}"


def _advantage(best: PlanEntry, other: PlanEntry) -> str:
    if best.candidate.distance < other.candidate.distance:
        return "its state lies nearer"
    saved = other.needs.total("device") - best.needs.total("device")
    if saved > 0:
        return f"needs {short_bytes(saved)} less of a GPU"
    return "is simpler"


def _about_traffic(best: PlanEntry, rows: Sequence[PlanEntry], near: Sequence[PlanEntry]) -> list[str]:
    """What stage 3 sends against stage 2, where both fit in the same tier."""
    tiers = best.candidate.options.items() - {("stage", best.candidate.stage)}
    other = next(
        (
            row
            for row in rows
            if row.fits
            and {row.candidate.stage, best.candidate.stage} == {2, 3}
            and row.candidate.options.items() - {("stage", row.candidate.stage)} == tiers
        ),
        None,
    )
    if other is None or not other.step.sent:
        return []
    second, third = (best, other) if best.candidate.stage == 2 else (other, best)
    traffic = f"{short_bytes(third.step.sent)} against {short_bytes(second.step.sent)} a step"
    slower = third.step.seconds / second.step.seconds - 1
    if best is third:
        return [
            f"what stage 3 sends more than stage 2 ({traffic}) costs {max(slower, 0):.1%} of the step here"
        ]
    if other in near:
        return []
    return [f"stage 3 sends more ({traffic}), and a step would take {slower:.0%} longer on this link"]
