"""`python -m scripts.gpu_check`: build, test and measure on this machine's GPU."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import torch

from scripts.gpu_check.report import summary, verdict, write
from scripts.gpu_check.runner import Runner
from scripts.gpu_check.step import Outcome
from scripts.gpu_check.steps import SUITES, chosen, find_program, gpu_steps, is_source_tree, rehearsal_steps

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "gpu"
NO_GPU = 3
WIDTH_OF_A_STEP, WIDTH_OF_A_VERDICT = 20, 10
MOST_JOBS = 4
PACKAGES = ("numpy", "pydantic", "pytest", "triton", "transformers", "deepspeed")


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.gpu_check",
        description="Build the extension, run the GPU tests and benchmarks, write a report.",
        epilog="Exit status: 0 if all passed, 1 if a step failed or a bar was missed, 3 without a GPU.",
    )
    default_output = Path(os.environ["OUT"]) if os.environ.get("OUT") else RESULTS
    cores = len(os.sched_getaffinity(0))
    add = parser.add_argument
    add("--suite", choices=SUITES, default="", help="is it right, or how fast is it; default: both, in turn")
    add("--budget", type=float, default=540.0, metavar="SECONDS", help="time for everything (default 540)")
    add(
        "--output",
        type=Path,
        default=default_output,
        help="folder of the report (default $OUT, else in the tree)",
    )
    add("--only", default="", metavar="STEPS", help="comma-separated steps, like test_adam,copies")
    add("--jobs", type=int, default=min(MOST_JOBS, cores), help="steps at a time, where none measures time")
    add(
        "--memory",
        type=float,
        default=0.0,
        metavar="GIB",
        help="host memory for large models; 0: what is free",
    )
    add("--rehearse", action="store_true", help="on the CPU at toy sizes, judging no figure")
    found = parser.parse_args(arguments)
    for name in ("budget", "jobs"):
        if getattr(found, name) <= 0:
            parser.error(f"--{name}: expected more than 0, got {getattr(found, name)}. Leave it out.")
    if found.memory < 0:
        parser.error(f"--memory: expected 0 or more, got {found.memory}. Leave it out.")
    if not is_source_tree(ROOT):
        parser.error(f"{ROOT}: expected a checkout, got a folder without csrc/cuda, tests and benchmarks.")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the steps that the command line asks for; the exit status."""
    asked = options(arguments)
    if not asked.rehearse and not torch.cuda.is_available():
        built = f"torch {torch.__version__} is built for CUDA {torch.version.cuda or '(none)'}"
        print(f"No GPU: {built} and sees no CUDA device. Nothing was run. --rehearse runs it on the CPU.")
        return NO_GPU
    output: Path = asked.output
    output.mkdir(parents=True, exist_ok=True)
    made = rehearsal_steps(asked.suite) if asked.rehearse else gpu_steps(asked.suite, asked.memory, output)
    try:
        steps = chosen(made, asked.only)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    facts = describe()
    for name, value in facts.items():
        print(f"{name}: {value}")
    judged = not asked.rehearse
    with tempfile.TemporaryDirectory(prefix="gpu_check-") as folder:
        logs = Path(folder)

        def record(outcomes: Sequence[Outcome]) -> None:
            write(output, logs, outcomes, facts, judged)

        runner = Runner(ROOT, logs, asked.budget, _print, judged=judged, jobs=asked.jobs, record=record)
        outcomes = runner.run(steps)
    _close(outcomes, output, judged)
    return verdict(outcomes, judged)


def _print(line: str) -> None:
    print(line, flush=True)


def _close(outcomes: Sequence[Outcome], output: Path, judged: bool) -> None:
    print()
    for step, what, word in summary(outcomes, judged):
        print(f"{step:{WIDTH_OF_A_STEP}} {word:{WIDTH_OF_A_VERDICT}} {what}")
    print(f"wrote report.json, report.md and logs.tar.gz in {output}")


def describe() -> dict[str, str]:
    """Where the report comes from, without touching the GPU's settings."""
    fields = "name,memory.total,driver_version,clocks.max.sm,clocks.max.memory"
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": f"python -m scripts.gpu_check {shlex.join(sys.argv[1:])}".strip(),
        "commit": _first_line(["git", "describe", "--always", "--dirty"]),
        "GPU": _first_line(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "packages": ", ".join(f"{name} {_version(name)}" for name in PACKAGES),
        "nvcc": find_program("nvcc") or "not found",
        "Python": platform.python_version(),
        "kernel": platform.release(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{_total_memory() / 2**30:.1f} GiB",
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _first_line(command: list[str]) -> str:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown: {type(error).__name__}"
    return (done.stdout.strip() or done.stderr.strip() or "unknown").splitlines()[0]


def _total_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    sys.exit(main())
