"""The longest sequence that trains under a memory cap: sparse attention against dense.

Run from the repository root: python -m benchmarks.long_sequence [--cap 10] [--dtype bfloat16]
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.harness.environment import describe
from benchmarks.harness.long_model import LAYOUT
from benchmarks.harness.long_trial import OUT_OF_MEMORY
from benchmarks.harness.report import Table, conclude, megabytes, terminal
from zero_ext.monitor import capped

BAR = 10.0
GRAIN = 64  # lengths are whole blocks
CLOSE = 1.05  # dense attention's limit is known to this factor
PROBES = {"sparse": (4096, 8192), "flash": (2048, 4096)}
MARGINS = (0.97, 0.92, 0.85, 0.75)  # parts of the predicted limit that are tried, one after the other
NAMES = {"math": "dense, torch's math kernel", "flash": "dense, torch's flash kernel", "sparse": "zero_ext"}


@dataclass(frozen=True)
class Trial:
    """One attempt to train a step."""

    kind: str
    tokens: int
    trained: bool
    peak_bytes: int = 0
    seconds: float = 0.0
    loss: float = 0.0


def attempt(kind: str, tokens: int, cap_bytes: int, dtype: str, console: Console) -> Trial:
    """A step in a process of its own under the cap. Raises RuntimeError if it fails for another reason."""
    command = [sys.executable, "-m", "benchmarks.harness.long_trial", kind, str(tokens), dtype]
    with capped(lambda watched: cap_bytes) as cap:
        done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=cap.enter)
        killed = done.returncode == -signal.SIGKILL and cap.kills() != 0
    if done.returncode == 0:
        facts = json.loads(done.stdout.splitlines()[-1])
        trial = Trial(kind, tokens, True, **facts)
        ending = f"trained in {trial.seconds:.1f} s, peak {megabytes(trial.peak_bytes)} MB"
    elif killed or done.returncode == OUT_OF_MEMORY:
        trial, ending = Trial(kind, tokens, False), "out of memory"
    else:
        raise RuntimeError(f"{kind} at {tokens} tokens ended with {done.returncode}: {done.stderr[-2000:]}")
    console.print(f"{NAMES[kind]}, {tokens:,} tokens: {ending}", highlight=False)
    return trial


def longest_dense(cap_bytes: int, dtype: str, console: Console) -> list[Trial]:
    """Doubling lengths until one fails, then halving the gap."""
    works, fails, trials = 0, 1024, []
    while True:
        trials.append(attempt("math", fails, cap_bytes, dtype, console))
        if not trials[-1].trained:
            break
        works, fails = fails, 2 * fails
    while works and fails > CLOSE * works:
        middle = max(works + GRAIN, (works + fails) // 2 // GRAIN * GRAIN)
        trials.append(attempt("math", middle, cap_bytes, dtype, console))
        works, fails = (middle, fails) if trials[-1].trained else (works, middle)
    return trials


def predicted(trials: list[Trial], cap_bytes: int) -> int:
    """Tokens at which a straight line through two peaks meets the cap."""
    first, second = trials[-2:]
    slope = (second.peak_bytes - first.peak_bytes) / (second.tokens - first.tokens)
    return int(first.tokens + (cap_bytes - first.peak_bytes) / slope)


def longest_linear(
    kind: str, cap_bytes: int, dtype: str, console: Console, tried: bool
) -> tuple[int, list[Trial]]:
    """Two short lengths, the limit that their peaks foretell, and the longest below it that trains."""
    trials = [attempt(kind, tokens, cap_bytes, dtype, console) for tokens in PROBES[kind]]
    if not all(trial.trained for trial in trials):
        return 0, trials
    limit = predicted(trials, cap_bytes)
    console.print(f"{NAMES[kind]}: the line meets the cap at {limit:,} tokens", highlight=False)
    for margin in MARGINS if tried else ():
        trials.append(attempt(kind, int(limit * margin) // GRAIN * GRAIN, cap_bytes, dtype, console))
        if trials[-1].trained:
            break
    return limit, trials


def best(trials: list[Trial]) -> int:
    """The longest that trained, 0 if none did."""
    return max((trial.tokens for trial in trials if trial.trained), default=0)


def table_of(trials: list[Trial], note: str) -> Table:
    """Every attempt."""
    table = Table(
        "Longest sequence under a cap",
        ("attention", "tokens", "trained", "peak MB", "s/step", "loss"),
        note=note,
    )
    for trial in trials:
        facts = (megabytes(trial.peak_bytes), f"{trial.seconds:.1f}", f"{trial.loss:.3f}")
        ending = ("yes", *facts) if trial.trained else ("no", "", "", "")
        table.rows.append([NAMES[trial.kind], f"{trial.tokens:,}", *ending])
    return table


def main(
    cap: Annotated[float, typer.Option(help="Cap of the process, GiB.")] = 10.0,
    dtype: Annotated[
        str, typer.Option(help="Of parameters and activations: bfloat16 or float32.")
    ] = "bfloat16",
    output: Annotated[str, typer.Option(help="Name of the files in benchmarks/results.")] = "long_sequence",
) -> None:
    """Find the longest sequences; write benchmarks/results/long_sequence.{json,md}."""
    console = terminal()
    if dtype not in ("bfloat16", "float32"):
        raise typer.BadParameter(f"--dtype: {dtype!r} given, 'bfloat16' or 'float32' wanted")
    cap_bytes = int(cap * 2**30)
    dense = longest_dense(cap_bytes, dtype, console)
    flash_limit, flash = longest_linear("flash", cap_bytes, dtype, console, tried=False)
    sparse_limit, sparse = longest_linear("sparse", cap_bytes, dtype, console, tried=True)
    ratio = best(sparse) / best(dense) if best(dense) else 0.0
    note = (
        f"{best(sparse):,} tokens against {best(dense):,}: {ratio:.1f} times (bar ≥ {BAR:g}). BERT-base's "
        f"shape, {dtype}, batch 1, AdamW, torch's checkpointing of every layer, loss by chunks on all sides; "
        f"cap {cap:g} GiB. Layout: fixed, block {LAYOUT.block}, windows of {LAYOUT.num_local_blocks} blocks. "
        f"Torch's flash kernel keeps no matrix of weights: its two peaks foretell {flash_limit:,} tokens, "
        "not run, at a time that grows with their square."
    )
    table = table_of([*dense, *flash, *sparse], note)
    facts: dict[str, Any] = {
        "ratio": ratio,
        "bar": BAR,
        "met": ratio >= BAR,
        "dtype": dtype,
        "cap": cap_bytes,
    }
    facts |= {"longest": {"math": best(dense), "sparse": best(sparse)}}
    facts |= {"foretold": {"flash": flash_limit, "sparse": sparse_limit}}
    facts |= {"trials": [asdict(trial) for trial in (*dense, *flash, *sparse)]}
    failures = [] if facts["met"] else [f"{ratio:.1f} times the tokens of dense attention, bar {BAR:g}"]
    conclude(console, output, "Long sequences", [table], {"environment": describe(), **facts}, failures)


if __name__ == "__main__":
    typer.run(main)
