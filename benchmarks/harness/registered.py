"""A run of the protocol: a benchmark's script, its exact arguments, and the result that it records."""

from __future__ import annotations

import ast
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# As paths for git, with what runs on CPUs: no CUDA and no tests.
SHARED_SOURCES = (
    "zero_ext",
    "csrc/core",
    "csrc/ops",
    "csrc/swap_storage",
    "examples/demo",
    "examples/demo_3d",
    ":(exclude)*.md",
    # No benchmark has zero_ext read checkpoints of torch or DeepSpeed.
    ":(exclude)zero_ext/integrations/dcp_*.py",
    ":(exclude)zero_ext/integrations/deepspeed/checkpoint_io",
)
# `prepare` and training steps do not import them, so they count where a benchmark names what does.
NO_CHECKPOINTS = ":(exclude)zero_ext/checkpoint"
_USES_CHECKPOINTS = re.compile(
    r"zero_ext\.checkpoint\b|(save|load)_(checkpoint|weights)\b|from_pretrained\b|nvme_sweep\b"
)
TUNED_SETTINGS = Path("benchmarks/peers/tuned_settings")
# They decide what is recorded and read it again. No figure depends on them.
RECORDING = {f"benchmarks.{name}" for name in ("runs", "harness.registered", "harness.recorded")}
_MODULE = re.compile(r"benchmarks(\.\w+)+")


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
        """Paths under ROOT, as git reads them, whose changes make the result outdated: the package, the
        script, the modules of benchmarks that it imports or starts, and theirs. Checkpoints count where one
        of these uses them. Where peers have settings of a sweep, those on the models of `--models`."""
        found = [f"benchmarks/{self.module}.py"]
        for path in found:
            found += sorted(used_files(path) - set(found))
        if TUNED_SETTINGS.with_suffix(".py").as_posix() in found:
            models = dict(pairwise(self.arguments)).get("--models", "").split(",")
            files = (TUNED_SETTINGS / f"{model}.json" for model in models)
            found += [file.as_posix() for file in files if (ROOT / file).exists()]
        texts = ((ROOT / path).read_text() for path in found if path.endswith(".py"))
        checkpoints = [] if any(map(_USES_CHECKPOINTS.search, texts)) else [NO_CHECKPOINTS]
        return [*SHARED_SOURCES, *checkpoints, *sorted(found)]


@cache
def used_files(path: str) -> set[str]:
    """Files of benchmarks that a file imports, or names in a string as it starts them. All are relative to
    ROOT. Packages count where something is imported from them, and RECORDING is left out."""
    names: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.ImportFrom):
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            script = node.value.removesuffix(".py")
            names.add(node.value if script == node.value else f"benchmarks.{script}")
    modules = {name for name in names if _MODULE.fullmatch(name)} - RECORDING
    files = {name.replace(".", "/") for name in modules}
    found = {f"{file}.py" for file in files} | {f"{file}/__init__.py" for file in files}
    return {file for file in found if (ROOT / file).is_file()}


def run_of_command(runs: Sequence[Run], argv: Sequence[str]) -> Run | None:
    """The registered run with exactly this script and these arguments; None for any other command."""
    script, arguments = Path(argv[0]).resolve(), tuple(argv[1:])
    return next((run for run in runs if (run.script, run.arguments) == (script, arguments)), None)
