"""A run of the protocol: a benchmark's script, its exact arguments, and the result that it records."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHARED_SOURCES = ("zero_ext", "csrc", "examples/demo", "examples/demo_3d", "benchmarks/harness")
PEERS = "benchmarks/peers"
TUNED_SETTINGS = f"{PEERS}/tuned_settings"
_MODULE = re.compile(r'from benchmarks\.([\w.]+) import|"benchmarks\.([\w.]+)"|"(\w+)\.py"')


@dataclass(frozen=True)
class Run:
    """One line of `benchmarks/runs.py`; `name` is that of its files in `benchmarks/results`.

    Rounds and steps are the defaults of the script, so `arguments` select rows and, for step times, the
    workload: ranks, tokens and accumulation. `minutes` is what it takes on two cores, `quick` makes it one
    of `make bench-quick`.
    """

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    minutes: float = 1.0
    quick: bool = False

    @property
    def script(self) -> Path:
        return ROOT / "benchmarks" / f"{self.module}.py"

    @property
    def command(self) -> str:
        """What a shell runs, as results record it."""
        return f"python -m benchmarks.{self.module} {shlex.join(self.arguments)}".strip()

    @property
    def process(self) -> list[str]:
        """The same for `subprocess`, with this interpreter."""
        return [sys.executable, "-m", f"benchmarks.{self.module}", *self.arguments]

    def sources(self) -> list[str]:
        """Files and folders under ROOT whose changes make the result outdated: the package, what all
        benchmarks share, the script and other scripts that it imports or starts, and the peers if one of
        these needs them, with the settings that they have on the models of `--models` alone. Paths are those
        of Git, which excludes some by a prefix."""
        found, peers = [f"benchmarks/{self.module}.py"], False
        for path in found:
            names = {"".join(groups) for groups in _MODULE.findall((ROOT / path).read_text())} - {"runs"}
            peers |= any(name.split(".")[0] == "peers" for name in names)
            scripts = {f"benchmarks/{name.replace('.', '/')}.py" for name in names}
            found += sorted(each for each in scripts - set(found) if (ROOT / each).exists())
        scripts = {path for path in found if Path(path).parent == Path("benchmarks")}
        return [*SHARED_SOURCES, *([PEERS, *self._other_settings()] if peers else []), *sorted(scripts)]

    def _other_settings(self) -> list[str]:
        models = dict(pairwise(self.arguments)).get("--models", "").split(",")
        files = sorted((ROOT / TUNED_SETTINGS).glob("*.json"))
        return [f":(exclude){TUNED_SETTINGS}/{file.name}" for file in files if file.stem not in models]


def run_of_command(runs: Sequence[Run], argv: Sequence[str]) -> Run | None:
    """The registered run with exactly this script and these arguments; None for any other command."""
    script, arguments = Path(argv[0]).resolve(), tuple(argv[1:])
    return next((run for run in runs if (run.script, run.arguments) == (script, arguments)), None)
