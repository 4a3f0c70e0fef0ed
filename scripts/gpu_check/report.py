"""The report of a check: report.json, report.md, an archive of the logs, a short table for the terminal."""

from __future__ import annotations

import io
import json
import math
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.gpu_check.step import Outcome


def verdict(outcomes: Sequence[Outcome], judged: bool) -> int:
    """Exit status: 1 if a step failed or, where figures are `judged`, a bar was missed; else 0."""
    failed = any(outcome.status == "failed" for outcome in outcomes)
    missed = judged and any(not bar.met for outcome in outcomes for bar in outcome.bars)
    return 1 if failed or missed else 0


def summary(outcomes: Sequence[Outcome], judged: bool) -> list[tuple[str, str, str]]:
    """Rows (step, what, verdict): every step, then each of its bars."""
    rows: list[tuple[str, str, str]] = []
    for outcome in outcomes:
        line = outcome.reason.splitlines()[0] if outcome.reason else ""
        rows.append((outcome.name, f"{outcome.seconds:.1f} s {line}".strip(), outcome.status))
        for bar in outcome.bars:
            met = ("met" if bar.met else "MISSED") if judged else "not judged"
            rows.append((outcome.name, f"{bar.name}: {bar.text()}", met))
        rows += [(outcome.name, what, "left out") for what in outcome.left_out]
    return rows


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def markdown(outcomes: Sequence[Outcome], facts: Mapping[str, str], judged: bool) -> str:
    """The report for readers: the summary, every step's tables, and where it ran."""
    sections = ["# GPU check"]
    if not judged:
        sections.append(
            "A rehearsal on the CPU at toy sizes: it shows that every step runs. No figure counts."
        )
    sections.append(table(("step", "what", "verdict"), summary(outcomes, judged)))
    for outcome in outcomes:
        for each in outcome.result.get("tables", []):
            sections.append(f"## {each['title']}")
            sections.append(table(each["columns"], each["rows"]))
            sections += [each["note"]] if each.get("note") else []
        if outcome.status == "failed" and outcome.reason:
            sections.append(f"## {outcome.name} failed\n\n```\n{outcome.reason}\n```")
    sections.append("## Where and how\n\n" + "\n".join(f"- {name}: {value}" for name, value in facts.items()))
    return "\n\n".join(sections) + "\n"


def write(
    folder: Path, logs: Path, outcomes: Sequence[Outcome], facts: Mapping[str, str], judged: bool
) -> None:
    """report.json, report.md and logs.tar.gz, which holds the files of `logs`, in `folder`.

    Each replaces the one before in one move, so a check that is cut off leaves whole files.
    """
    data: dict[str, Any] = {
        "environment": dict(facts),
        "judged": judged,
        "exit_status": verdict(outcomes, judged),
        "steps": [outcome.json() for outcome in outcomes],
    }
    text = json.dumps(_finite(data), indent=1, allow_nan=False) + "\n"
    _replace(folder / "report.json", text.encode())
    _replace(folder / "report.md", markdown(outcomes, facts, judged).encode())
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as packed:
        for outcome in outcomes:
            if outcome.log:
                packed.add(logs / outcome.log, f"logs/{outcome.log}")
    _replace(folder / "logs.tar.gz", archive.getvalue())


def _replace(path: Path, content: bytes) -> None:
    beside = path.with_name(f".{path.name}.new")
    beside.write_bytes(content)
    beside.replace(path)


def _finite(value: Any) -> Any:
    """JSON has no infinities and no NaN; they become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value
