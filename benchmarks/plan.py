"""How long `zero-ext plan` takes to answer, start of the interpreter included.

Run from the repository root: python -m benchmarks.plan
"""

import subprocess
import sys
import time
from statistics import median
from typing import Annotated

import typer

from benchmarks.harness.environment import describe
from benchmarks.harness.report import Table, conclude, terminal

SECONDS_BAR = 2.0
HELD = "1t "  # the model that the bar is for
PLANS = (
    ("llama-7b", "--gpus", "8"),
    ("1t", "--machine", "dgx2-v100", "--gpus", "16"),
    ("1t", "--machine", "dgx2-v100", "--gpus", "512"),
    ("100t", "--machine", "dgx-h200", "--gpus", "1536"),
)


def seconds_of(arguments: tuple[str, ...]) -> float:
    """Wall time of the command in a process of its own."""
    begin = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "zero_ext.cli", "plan", *arguments], check=True, stdout=subprocess.DEVNULL
    )
    return time.perf_counter() - begin


def main(
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each; the median counts.")] = 7,
) -> None:
    """Time a few plans."""
    console = terminal()
    found = {
        " ".join(arguments): median(seconds_of(arguments) for _ in range(repeats)) for arguments in PLANS
    }
    table = Table(
        "zero-ext plan, seconds from command to answer",
        ("command", "seconds"),
        [(f"zero-ext plan {name}", f"{seconds:.2f}") for name, seconds in found.items()],
        note=f"Wanted for a trillion parameters: under {SECONDS_BAR:.0f} s.",
    )
    missed = [
        f"zero-ext plan {name}: {seconds:.2f} s, bar {SECONDS_BAR:g} s"
        for name, seconds in found.items()
        if name.startswith(HELD) and seconds >= SECONDS_BAR
    ]
    data = {"environment": describe(), "seconds": found}
    conclude(console, "plan", "Planning", [table], data, missed)


if __name__ == "__main__":
    typer.run(main)
