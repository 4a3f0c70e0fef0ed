"""Recorded results: where each comes from, and whether it still describes the code."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.harness.environment import DIRTY, git
from benchmarks.harness.registered import Run


@dataclass(frozen=True)
class Recorded:
    """One JSON file of results and the run that it belongs to, None for a result that no run writes."""

    path: Path
    name: str
    run: Run | None
    data: dict[str, Any]

    @property
    def commit(self) -> str:
        return str(self.data["environment"]["commit"])

    @property
    def date(self) -> datetime:
        return datetime.fromisoformat(self.data["environment"]["date"])

    @property
    def age(self) -> str:
        """Days since the measurement."""
        return f"{(datetime.now(timezone.utc) - self.date).days} d"

    @property
    def minutes(self) -> float | None:
        """Minutes that it took, where they are recorded."""
        found = self.data["environment"].get("minutes")
        return None if found is None else float(found)

    @property
    def met(self) -> str:
        """'yes', or how many bars were missed; '' for a result from before bars were recorded."""
        missed = self.data.get("missed")
        return "" if missed is None else ("yes" if not missed else f"{len(missed)} missed")

    def why_no_protocol(self) -> str:
        """Why a run of today would not be recorded like this; empty for a result of the protocol."""
        if self.run is None:
            return "no registered run"
        if self.data["environment"]["command"] != self.run.command:
            return "other arguments"
        if self.commit.endswith(DIRTY):
            return "from a tree with changes"
        return "" if "missed" in self.data else "from before the protocol"

    def why_outdated(self) -> str:
        """What makes a new measurement necessary; empty for a result that is fresh."""
        reason = self.why_no_protocol()
        if self.run is None or reason:
            return reason
        changed = git("diff", "--name-only", self.commit, "--", *self.run.sources())
        if changed is None:
            return "commit not found"
        count = len(changed.splitlines())
        return f"{count} file{'s' if count > 1 else ''} changed" if count else ""


def recorded_result(run: Run, folder: Path) -> Recorded | None:
    """The result of a run, if there is one."""
    path = folder / f"{run.name}.json"
    return Recorded(path, run.name, run, json.loads(path.read_text())) if path.exists() else None


def recorded_results(runs: tuple[Run, ...], folder: Path) -> list[Recorded]:
    """All results in the order of their runs, then those without a run. Those of GPUs have reports of their
    own form and are left out."""
    found = [result for run in runs if (result := recorded_result(run, folder))]
    names = {result.name for result in found}
    for path in sorted(folder.rglob("*.json")):
        name = path.relative_to(folder).with_suffix("").as_posix()
        if name not in names and not name.startswith("gpu/"):
            found.append(Recorded(path, name, None, json.loads(path.read_text())))
    return found
