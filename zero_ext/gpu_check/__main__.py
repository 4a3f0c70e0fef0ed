"""`python -m zero_ext.gpu_check`: build, test and measure on this machine's GPU."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import torch
import typer

from zero_ext.gpu_check.report import summary, verdict, write
from zero_ext.gpu_check.runner import Runner
from zero_ext.gpu_check.step import Outcome
from zero_ext.gpu_check.steps import chosen, find_program, gpu_steps, is_source_tree, rehearsal_steps

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "gpu"
NO_GPU = 3
WIDTH_OF_A_STEP, WIDTH_OF_A_VERDICT = 12, 10


def main(
    minutes: Annotated[
        float, typer.Option(min=0.1, help="Time for everything; what matters most runs first.")
    ] = 9.0,
    output: Annotated[Path, typer.Option(help="Folder for report.json, report.md and the logs.")] = RESULTS,
    memory: Annotated[
        float, typer.Option(min=0, help="GiB of host memory for large models; 0: what is free.")
    ] = 0.0,
    only: Annotated[str, typer.Option(help="Comma-separated steps, e.g. tests,adam.")] = "",
    rehearse: Annotated[
        bool, typer.Option(help="On the CPU, at toy sizes, judging no figure: shows that all runs.")
    ] = False,
) -> None:
    """Build the extension, run the GPU tests and the GPU benchmarks, write a report.

    Exit status: 0 if all passed, 1 if a test failed or a bar was missed, 3 without a GPU.
    """
    if not is_source_tree(ROOT):
        raise typer.BadParameter(
            f"{ROOT} is no source tree of zero_ext; run it from a checkout, which has the tests"
        )
    if not rehearse and not torch.cuda.is_available():
        built = f"torch {torch.__version__} is built for CUDA {torch.version.cuda or '(none)'}"
        typer.echo(
            f"No GPU: {built} and sees no CUDA device. Nothing was run. --rehearse runs it on the CPU."
        )
        raise typer.Exit(NO_GPU)
    try:
        steps = chosen(rehearsal_steps() if rehearse else gpu_steps(memory), only)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    output.mkdir(parents=True, exist_ok=True)
    facts = describe()
    for name, value in facts.items():
        typer.echo(f"{name}: {value}")
    judged = not rehearse
    outcomes = Runner(ROOT, output, 60 * minutes, lambda line: typer.echo(line), judged).run(steps)
    write(output, outcomes, facts, judged)
    _close(outcomes, output, judged)
    raise typer.Exit(verdict(outcomes, judged))


def _close(outcomes: Sequence[Outcome], output: Path, judged: bool) -> None:
    typer.echo("")
    for step, what, word in summary(outcomes, judged):
        typer.echo(f"{step:{WIDTH_OF_A_STEP}} {word:{WIDTH_OF_A_VERDICT}} {what}")
    typer.echo(f"wrote {output / 'report.json'} and {output / 'report.md'}")


def describe() -> dict[str, str]:
    """Where the report comes from, without touching the GPU's settings."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": f"python -m zero_ext.gpu_check {shlex.join(sys.argv[1:])}".strip(),
        "commit": _first_line(["git", "describe", "--always", "--dirty"]),
        "GPU": _first_line(
            [
                "nvidia-smi",
                "--query-gpu=name,memory.total,driver_version,clocks.max.sm,clocks.max.memory",
                "--format=csv,noheader",
            ]
        ),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "nvcc": find_program("nvcc") or "not found",
        "Python": platform.python_version(),
        "kernel": platform.release(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{_total_memory() / 2**30:.1f} GiB",
    }


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
    typer.run(main)
