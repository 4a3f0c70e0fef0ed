"""The placement to use, and why, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from zero_ext.plan.parse_sizes import short_bytes
from zero_ext.plan.plan_entry import PlanEntry, activation_words
from zero_ext.plan.simulation.training_setup import ACTIVATIONS

Objective = Literal["memory", "speed"]
OBJECTIVES = ("memory", "speed")
ALIKE = 1.05  # placements whose speeds differ by less are taken for equally fast
SLOWEST = 2.0  # times the fastest step, that is the most that saving memory may cost
_UNNOTICED = 0.0005  # of a step
_MEMORY = {"device": "GPU memory", "host": "host memory", "nvme": "NVMe"}


@dataclass(frozen=True)
class Recommendation:
    """The placement to use, and the reasons, each a sentence."""

    entry: PlanEntry
    reasons: tuple[str, ...]


def recommend(rows: Sequence[PlanEntry], objective: Objective) -> Recommendation | None:
    """Return the placement of ``rows`` that fits and serves the objective best, or None if none fits.

    ``speed``: the most tokens per second. Among those within 5% of it: the nearest tiers, then the least GPU
    memory. ``memory``: the least GPU memory among those at most twice as slow as the fastest. Ties go to the
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
    found = _why_not_simpler(best, rows) if best.candidate.stage or best.candidate.distance else []
    if objective == "memory":
        found.append("It needs the least GPU memory of all that are at most twice as slow as the fastest.")
    elif best is fastest:
        found.append("No other placement that fits is faster.")
    else:
        slower = 1 - best.tokens_per_second / fastest.tokens_per_second
        speed = f"{slower:.1%} slower than" if slower > _UNNOTICED else "as fast as"
        found.append(
            f"It is {speed} the fastest that fits ({fastest.candidate}), and {_advantage(best, fastest)}."
        )
    found += _about_traffic(best, rows, near)
    training = best.training
    batch = f"The micro-batch is {training.micro_batch}"
    if training.accumulation_steps > 1:
        batch += f", {training.accumulation_steps} of them per step"
    found.append(f"{_capitalized(activation_words(training.activations))}. {batch}.")
    return found


def _why_not_simpler(best: PlanEntry, rows: Sequence[PlanEntry]) -> list[str]:
    """Return the simpler placements that do not fit, with what the last of them lacks."""
    simpler = [
        row
        for row in rows
        if not row.fits
        and (row.candidate.distance, row.candidate.stage) < (best.candidate.distance, best.candidate.stage)
    ]
    if not simpler:
        return []
    last = simpler[-1]
    lacks = " and ".join(
        f"{short_bytes(short.needed - short.available)} of {_MEMORY[short.tier]}" for short in last.shortfalls
    )
    others = f" {len(simpler) - 1} other simpler placements do not fit either." if len(simpler) > 2 else ""
    if len(simpler) == 2:
        others = f" Nor does {simpler[0].candidate}."
    return [f"{_capitalized(str(last.candidate))} does not fit: it lacks {lacks}.{others}"]


def _advantage(best: PlanEntry, other: PlanEntry) -> str:
    if best.candidate.distance < other.candidate.distance:
        return "stores its state closer to the GPU"
    saved = other.needs.total("device") - best.needs.total("device")
    if saved > 0:
        return f"needs {short_bytes(saved)} less GPU memory"
    return "is simpler"


def _about_traffic(best: PlanEntry, rows: Sequence[PlanEntry], near: Sequence[PlanEntry]) -> list[str]:
    """Return the traffic of stage 3 against that of stage 2, where both fit in the same tier."""
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
    sent = short_bytes(third.step.sent), short_bytes(second.step.sent)
    traffic = f"Stage 3 sends {sent[0]} per step where stage 2 sends {sent[1]}"
    slower = third.step.seconds / second.step.seconds - 1
    if best is third:
        cost = f"{slower:.1%} of a step" if slower > _UNNOTICED else "no time"
        return [f"{traffic}. The difference costs {cost} on this link."]
    if other in near:
        return []
    return [f"{traffic}, and a step would be {slower:.0%} longer on this link."]


def _capitalized(words: str) -> str:
    return words[0].upper() + words[1:]
