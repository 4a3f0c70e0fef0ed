"""The share of small faults that the tests find.

Draws mutants of the engine and of csrc/core, by a seed, and runs the tests for each in a worktree of HEAD:
first those that mirror the faulty file, then the wider ones of its area. A mutant that does not compile is
replaced by another. Every result is a line of JSON at once, so that an interrupted run goes on where it was,
and one with --no-wider is continued by one without.

Run from the repository root: python -m scripts.mutation --results build/mutants.jsonl
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from scripts.mutation.mutants import Mutant, mutants_of

ROOT = Path.cwd()
MIRRORED, WIDER = "mirrored", "wider"
UNNOTICED = "unnoticed by mirrored tests"


@dataclass(frozen=True)
class Area:
    """Sources with their share of the mutants, and the tests that a mutant meets after its mirrored ones."""

    sources: str
    share: float
    wider: tuple[str, ...]


AREAS = (
    Area("zero_ext/zero", 0.35, ("tests/zero", "tests/offload", "tests/checkpoint", "tests/activation")),
    Area("zero_ext/comm", 0.15, ("tests/comm", "tests/zero", "tests/parallel")),
    Area("zero_ext/optim", 0.15, ("tests/optim", "tests/zero", "tests/ops", "tests/checkpoint")),
    Area("zero_ext/offload", 0.15, ("tests/offload", "tests/zero", "tests/checkpoint")),
    Area("csrc/core", 0.2, ()),
)


def drawn(root: Path, seed: int, count: int) -> Iterator[list[Mutant]]:
    """Yield for each area of a source tree its mutants, as many as wanted first, then substitutes."""
    for area in AREAS:
        sources = sorted(
            path for path in (root / area.sources).rglob("*") if path.suffix in (".py", ".h", ".cpp")
        )
        found = [one for path in sources for one in mutants_of(path, root)]
        random.Random(f"{seed} {area.sources}").shuffle(found)
        yield found[: 2 * round(area.share * count)]


def tests_of(root: Path, path: str, wider: tuple[str, ...]) -> list[tuple[str, list[str]]]:
    """Return the tests of a Python source in rounds: the mirrored file and folder, then the area's."""
    if not path.startswith("zero_ext/"):
        return [(WIDER, [])]
    source = Path(path)
    folder = root / "tests" / source.parent.relative_to("zero_ext")
    while not folder.is_dir():
        folder = folder.parent
    own = sorted(folder.glob("test_*.py"), key=lambda test: (source.stem not in test.stem, test.name))
    near = [str(test.relative_to(root)) for test in own]
    return [(MIRRORED, near), (WIDER, [*(f"--ignore={test}" for test in near), *wider])]


def ended(command: list[str], folder: Path, limit: float) -> str:
    """Return "passed", "failed" or "hung" of a command, whose processes are gone afterwards."""
    variables = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    with (folder / "build" / "mutant.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, stdout=log, stderr=log, env=variables, start_new_session=True
        )
        try:
            return "failed" if process.wait(limit) else "passed"
        except subprocess.TimeoutExpired:
            return "hung"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def fate_of(mutant: Mutant, folder: Path, rounds: list[tuple[str, list[str]]], limit: float) -> str:
    """Return "killed: …", "survived", UNNOTICED or "stillborn"; the source is as before afterwards."""
    target = folder / mutant.path
    source = target.read_text()
    target.write_text(mutant.applied(source))
    try:
        if target.suffix != ".py":
            if ended(["make", "-s", "build/cpp/plain/run-tests"], folder, 1800) != "passed":
                return "stillborn"
            gtest = ["build/cpp/plain/run-tests", "--gtest_brief=1", "--gtest_fail_fast"]
            result = ended(gtest, folder, limit)
            return "survived" if result == "passed" else f"killed: C++ tests {result}"
        for name, tests in rounds:
            pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
            result = ended(pytest, folder, limit)
            if result != "passed":
                return f"killed: {name} tests {result}"
        return "survived" if rounds[-1][0] == WIDER else UNNOTICED
    finally:
        target.write_text(source)


def main(
    results: Annotated[Path, typer.Option(help="File of results, a line of JSON each; it is continued.")],
    count: Annotated[int, typer.Option(min=len(AREAS), help="Mutants.")] = 150,
    seed: Annotated[int, typer.Option(help="Of the draw.")] = 0,
    only: Annotated[str, typer.Option(help="Areas to try, by the beginning of their folder.")] = "",
    wider: Annotated[bool, typer.Option(help="Run the wider tests of an area too.")] = True,
    limit: Annotated[
        float, typer.Option(help="Seconds of a round of tests before it counts as hung.")
    ] = 1800,
) -> None:
    """Draw mutants, run the tests for each, and print the share that is killed."""
    folder = ROOT / "build" / f"mutants-{results.stem}"
    subprocess.run(["git", "worktree", "prune"], check=True)
    if not folder.exists():
        subprocess.run(["git", "worktree", "add", "--detach", str(folder), "HEAD"], check=True)
    subprocess.run(["git", "-C", str(folder), "checkout", "-q", "."], check=True)  # of an interrupted run
    (folder / "build").mkdir(exist_ok=True)
    if not (folder / ".venv").exists():
        (folder / ".venv").symlink_to(ROOT / ".venv")
    for library in (ROOT / "zero_ext").glob("*.so"):
        shutil.copy2(library, folder / "zero_ext")
    known = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    fates = {Mutant(**one["mutant"]): one["fate"] for one in known}
    for area, mutants in zip(AREAS, drawn(folder, seed, count), strict=True):
        wanted = len(mutants) // 2 if area.sources.startswith(only) else 0
        for mutant in mutants:
            if wanted == 0:
                break
            before = fates.get(mutant)
            if before is None or (before == UNNOTICED and wider):
                begin = time.monotonic()
                rounds = tests_of(folder, mutant.path, area.wider)
                if before is None and not wider:
                    rounds = rounds[:1]
                elif before == UNNOTICED:
                    rounds = rounds[1:]
                fates[mutant] = fate_of(mutant, folder, rounds, limit)
                change = mutant.described((folder / mutant.path).read_text())
                seconds = round(time.monotonic() - begin)
                line = {"mutant": asdict(mutant), "fate": fates[mutant], "seconds": seconds, "change": change}
                with results.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(f"{fates[mutant]} ({seconds} s): {change}", flush=True)
            wanted -= fates[mutant] != "stillborn"
    counts = Counter(fate.split(":")[0] for fate in fates.values())
    tried = sum(counts.values()) - counts["stillborn"]
    ended_so = ", ".join(f"{counts[fate]} {fate}" for fate in ("killed", "survived", UNNOTICED))
    print(f"of {tried} mutants: {ended_so}")


if __name__ == "__main__":
    typer.run(main)
