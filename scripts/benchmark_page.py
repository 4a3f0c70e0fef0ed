"""Write the page of all recorded results of ``benchmarks/results``, with the origin of each.

``python -m scripts.benchmark_page docs/reference/benchmarks.md`` rewrites the page. It depends on the results
alone, so it changes only when one of them does. ``python -m benchmarks results`` compares them with the code.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from benchmarks.harness.recorded import Recorded, recorded_results
from benchmarks.harness.report import RESULTS
from benchmarks.runs import RUNS

LOAD = "load averages at the start"
_HEAD = """# Benchmark results

<!-- Written by `python -m scripts.benchmark_page docs/reference/benchmarks.md`. -->

All tables of `benchmarks/results`, each with its commit and date.
[The protocol](../contributing/benchmark_protocol.md) describes how they are measured, and
[Figures](figures.md) explains the most important ones. A result describes the code of its commit.
`python -m benchmarks results` lists those with code that has changed since. A result that the protocol would
not record today says why.
"""


def page() -> str:
    """Return the page."""
    return "\n".join([_HEAD, *map(_section, recorded_results(RUNS, RESULTS))])


def _section(result: Recorded) -> str:
    title, _, body = result.path.with_suffix(".md").read_text().partition("\n")
    tables = body.partition("\n## Where and how\n")[0].lstrip()
    heading = f"## {title.removeprefix('# ')}: {result.name}"
    return f"{heading}\n\n{_origin(result)}\n{re.sub('^## ', '### ', tables, flags=re.MULTILINE)}"


def _origin(result: Recorded) -> str:
    """Return what a reader needs to judge the tables; of older results some are not recorded."""
    environment = result.data["environment"]
    reason = result.why_no_protocol()
    facts = {
        "commit": f"`{result.commit}`",
        "date": f"{result.date:%Y-%m-%d}",
        "command": f"`{environment['command']}`",
        "by the protocol": f"no, {reason}" if reason else "yes",
        "bars": {"": "not recorded", "yes": "all met"}.get(result.met, result.met),
        "transport": environment.get("transport", "not recorded"),
        LOAD: environment.get(LOAD, "not recorded"),
        "processor": environment["cpu"],
        "torch": environment["torch"],
    }
    return "".join(f"- {name}: {fact}\n" for name, fact in facts.items())


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
