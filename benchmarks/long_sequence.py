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
CLOSE = 1.02  # dense attention is tried so far above its foretold limit
# Long enough for the math kernel that weights make the peak, not the optimizer.
PROBES = {"math": (3072, 4096), "sparse": (12_288, 16_384), "flash": (8192, 10_240)}
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


def shortest_failing(cap_bytes: int, dtype: str, console: Console) -> list[Trial]:
    """Short lengths of dense attention, and then, from just above the one at which their peaks foretell the
    cap, the first that does not train: what is longest for dense attention lies below it."""
    trials = [attempt("math", tokens, cap_bytes, dtype, console) for tokens in PROBES["math"]]
    if not all(trial.trained for trial in trials):
        raise RuntimeError(f"not all of {PROBES['math']} tokens train under {cap_bytes} bytes; raise --cap")
    limit = foretold(trials, cap_bytes)
    console.print(f"{NAMES['math']}: the parabola meets the cap at {limit:,} tokens", highlight=False)
    while trials[-1].trained:
        trials.append(attempt("math", _up(limit * CLOSE), cap_bytes, dtype, console))
        limit = trials[-1].tokens
    return trials


def foretold(trials: list[Trial], cap_bytes: int) -> int:
    """Tokens at which a + b * tokens ** 2 through the last two peaks meets the cap."""
    first, second = trials[-2:]
    slope = (second.peak_bytes - first.peak_bytes) / (second.tokens**2 - first.tokens**2)
    if slope <= 0:
        raise RuntimeError(f"peaks do not grow from {first} to {second}")
    return int((first.tokens**2 + (cap_bytes - first.peak_bytes) / slope) ** 0.5)


def _up(tokens: float) -> int:
    return -(-int(tokens) // GRAIN) * GRAIN


def tried(kind: str, cap_bytes: int, dtype: str, console: Console) -> list[Trial]:
    """The short lengths of a kind whose memory grows with the tokens alone."""
    return [attempt(kind, tokens, cap_bytes, dtype, console) for tokens in PROBES[kind]]


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
    multiple: Annotated[
        float,
        typer.Option(
            min=1.0, help="Sparse attention is tried at so many times a length that dense fails at."
        ),
    ] = 10.2,
) -> None:
    """Find a length that dense attention fails at and try sparse attention beyond; write the result."""
    console = terminal()
    if dtype not in ("bfloat16", "float32"):
        raise typer.BadParameter(f"--dtype: {dtype!r} given, 'bfloat16' or 'float32' wanted")
    cap_bytes = int(cap * 2**30)
    dense = shortest_failing(cap_bytes, dtype, console)
    failed = dense[-1].tokens
    flash = tried("flash", cap_bytes, dtype, console)
    sparse = tried("sparse", cap_bytes, dtype, console)
    sparse.append(attempt("sparse", _up(failed * multiple), cap_bytes, dtype, console))
    longest = max((trial.tokens for trial in sparse if trial.trained), default=0)
    ratio = longest / failed
    note = (
        f"{longest:,} tokens train, and {failed:,} with dense attention do not: more than {ratio:.1f} times "
        f"(bar ≥ {BAR:g}). BERT-base's shape, {dtype}, batch 1, AdamW, torch's checkpointing of every layer, "
        f"loss by chunks on all sides; cap {cap:g} GiB. Layout: fixed, block {LAYOUT.block}, windows of "
        f"{LAYOUT.num_local_blocks} blocks. Torch's flash kernel keeps no weights either: the cap does not "
        "end it at these lengths, time does, which grows with the square. Times are of one step each, on a "
        "machine that may have other work; only memory is measured here."
    )
    table = table_of([*dense, *flash, *sparse], note)
    facts: dict[str, Any] = {
        "ratio": ratio,
        "bar": BAR,
        "met": ratio >= BAR,
        "dtype": dtype,
        "cap": cap_bytes,
    }
    facts |= {"dense_fails": failed, "sparse_trains": longest}
    facts |= {"trials": [asdict(trial) for trial in (*dense, *flash, *sparse)]}
    failures = [] if facts["met"] else [f"{ratio:.1f} times the tokens of dense attention, bar {BAR:g}"]
    conclude(
        console, "long_sequence", "Long sequences", [table], {"environment": describe(), **facts}, failures
    )


if __name__ == "__main__":
    typer.run(main)
