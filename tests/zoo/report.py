"""The zoo's report: a Markdown table of cases and variants, and the causes of what did not pass."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence

import torch

from tests.zoo.case import VARIANTS
from tests.zoo.comparison import Outcome


def table(outcomes: Sequence[Outcome], seconds: float) -> str:
    """Return the report of ``outcomes``."""
    variants = [each for each in VARIANTS if any(outcome.variant == each for outcome in outcomes)]
    by_case: dict[str, dict[str, Outcome]] = {}
    for outcome in outcomes:
        by_case.setdefault(outcome.case, {})[outcome.variant] = outcome
    counts = Counter(outcome.kind for outcome in outcomes)
    wrong = [outcome for outcome in outcomes if not outcome.passed]
    lines = [
        "# Model zoo",
        "",
        f"{len(by_case)} models, {len(outcomes)} runs in {seconds:.0f} s: {counts['equal']} equal, "
        f"{counts['refused']} refused by name, {counts['failed']} failed. {len(wrong)} are not as expected.",
        f"torch {torch.__version__}, Python {platform.python_version()}.",
        "",
        "Numbers are the largest relative difference from plain torch. Capitals mark what was not expected.",
        "",
        "| model | " + " | ".join(variants) + " |",
        "| --- |" + " --- |" * len(variants),
    ]
    for name, found in by_case.items():
        lines.append(f"| {name} | " + " | ".join(_cell(found.get(variant)) for variant in variants) + " |")
    refused = [outcome for outcome in outcomes if outcome.kind == "refused" and outcome.passed]
    return "\n".join(lines + _causes("Not as expected", wrong) + _causes("Refused as expected", refused))


def _causes(title: str, outcomes: Sequence[Outcome]) -> list[str]:
    """Return a table of causes, with the variants of a case that have the same one in a row."""
    if not outcomes:
        return []
    rows: dict[tuple[str, str, str], list[str]] = {}
    for each in outcomes:
        rows.setdefault((each.case, each.kind, each.summary.replace("|", "\\|")), []).append(each.variant)
    lines = ["", f"## {title}", "", "| model | variants | outcome | cause |", "| --- | --- | --- | --- |"]
    return lines + [
        f"| {case} | {' '.join(variants)} | {kind} | {cause} |"
        for (case, kind, cause), variants in rows.items()
    ]


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    if outcome.kind == "equal":
        return outcome.detail
    return outcome.kind if outcome.passed else outcome.kind.upper()
