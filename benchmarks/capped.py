"""What fits under a memory cap: the largest model, and the longest sequence of one model.

`longest` has long sequences by offload alone, against DeepSpeed; `context` by what computes them in chunks,
against checkpointed blocks of PyTorch alone.

Run from the repository root: python -m benchmarks.capped [--cap 2] [--only model]
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.harness.environment import describe
from benchmarks.harness.ranks import Team, TeamFailure
from benchmarks.harness.report import Table, conclude, megabytes, terminal
from benchmarks.harness.shapes import SEQUENCE_LENGTH, llama_of, shape_named
from benchmarks.peers import contender_named
from benchmarks.peers.base import nvme_folder
from benchmarks.peers.deepspeed_operators import compile_for
from zero_ext.monitor import capped

STEPS = 3
MODEL_BAR = 10.0
LENGTH_BAR = 1.5
PLAIN_WIDTH, WIDTH = 512, 2048
LENGTHS = tuple(
    SEQUENCE_LENGTH * eighths // 4 for eighths in (4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)
)
LONG_SHAPE = "bloom-560m"
LONG_PAIR = ("stage3-nvme", "deepspeed3-nvme")
CONTEXT_BAR = 4
CONTEXT_SHAPE = "34m"
CONTEXT_PAIR = ("long@1", "checkpointed@1")
CONTEXT_GRAIN = 4096
CONTEXT_SECONDS = 3 * 3600.0  # of one step: dense attention of 80,000 tokens on two cores
ANSWER_SECONDS = 900.0  # of the steps of the others


@dataclass(frozen=True)
class Trial:
    """One attempt to train some steps under a cap; the peak is that of the fullest rank."""

    contender: str
    model: str
    parameters: int
    length: int
    cap_bytes: int
    cap_name: str
    trained: bool
    peak_bytes: int = 0
    seconds_a_step: float = 0.0
    first_loss: float = 0.0
    last_loss: float = 0.0
    reason: str = ""


def attempt(
    key: str,
    model: str,
    cap_bytes: int,
    length: int = SEQUENCE_LENGTH,
    steps: int = STEPS,
    seconds: float = ANSWER_SECONDS,
) -> Trial:
    """Train `model` with the contender `key`, all of its ranks under one cap of `cap_bytes`, for at most
    `seconds`."""
    contender, shape = contender_named(key), shape_named(model)
    with capped(lambda watched: cap_bytes) as cap:
        facts = (key, model, shape.parameters, length, cap_bytes, cap.name)
        try:
            with Team(
                contender.title, contender.ranks, contender.threads, cap=cap, timeout_seconds=seconds
            ) as team:
                team.start(contender, model)
                answers = team.ask("steps", unmeasured=0, measured=steps, length=length)
                memory = team.ask("memory")
        except TeamFailure as failure:
            return Trial(*facts, trained=False, reason=str(failure).splitlines()[0])
    losses = answers[0]["losses"]
    return Trial(
        *facts,
        trained=True,
        peak_bytes=max(answer["peak"] for answer in memory),
        seconds_a_step=max(answer["seconds"] for answer in answers) / steps,
        first_loss=losses[0],
        last_loss=losses[-1],
    )


def largest_plain(cap_bytes: int, console: Console) -> list[Trial]:
    """PyTorch alone at growing depth: bisection between a depth that trains and one that does not."""
    trials: list[Trial] = []
    works, fails = 0, 2
    while not trials or trials[-1].trained:
        works, fails = (fails, 2 * fails) if trials else (works, fails)
        trials.append(_report(attempt("frugal@1", llama_of(PLAIN_WIDTH, fails).name, cap_bytes), console))
    while fails - works > 1:
        middle = (works + fails) // 2
        trials.append(_report(attempt("frugal@1", llama_of(PLAIN_WIDTH, middle).name, cap_bytes), console))
        works, fails = (middle, fails) if trials[-1].trained else (works, middle)
    return trials


def largest_stored(cap_bytes: int, plain: int, factors: list[float], console: Console) -> list[Trial]:
    """zero_ext with everything on NVMe at these multiples of what PyTorch alone trains, until one fails."""
    trials: list[Trial] = []
    for factor in factors:
        layers = 1
        while llama_of(WIDTH, layers).parameters < factor * plain:
            layers += 1
        trials.append(_report(attempt("consumed@1", llama_of(WIDTH, layers).name, cap_bytes), console))
        if not trials[-1].trained:
            break
    return trials


def longest(cap_bytes: int, console: Console) -> list[Trial]:
    """DeepSpeed with growing sequences until it fails, then zero_ext from the bar upwards until it fails."""
    ours, theirs = LONG_PAIR
    trials: list[Trial] = []
    for key in (theirs, ours):
        least = LENGTH_BAR * best(trials, theirs, "length")
        for length in LENGTHS:
            if length < least:
                continue
            trials.append(_report(attempt(key, LONG_SHAPE, cap_bytes, length), console))
            if not trials[-1].trained:
                break
    return trials


def context(cap_bytes: int, console: Console) -> list[Trial]:
    """PyTorch alone with longer and longer sequences until it fails, then zero_ext with CONTEXT_BAR times the
    length that failed: its longest sequence is then longer than that many times PyTorch's. One step each,
    which PyTorch's optimizer ends without the moments in memory during backward."""
    ours, theirs = CONTEXT_PAIR
    trials: list[Trial] = []
    while not trials or trials[-1].trained:
        length = CONTEXT_GRAIN * (len(trials) + 1)
        trials.append(_report(_one_step(theirs, cap_bytes, length), console))
    length = CONTEXT_BAR * trials[-1].length
    trials.append(_report(_one_step(ours, cap_bytes, length), console))
    return trials


def _one_step(key: str, cap_bytes: int, length: int) -> Trial:
    return attempt(key, CONTEXT_SHAPE, cap_bytes, length, steps=1, seconds=CONTEXT_SECONDS)


def _report(trial: Trial, console: Console) -> Trial:
    ending = f"trained, peak {megabytes(trial.peak_bytes)} MB" if trial.trained else f"failed: {trial.reason}"
    console.print(f"{trial.contender} {trial.model} {trial.length} tokens: {ending}", highlight=False)
    return trial


def best(trials: list[Trial], key: str, figure: str) -> int:
    """The largest `figure` with which `key` trained; 0 if it never did."""
    return max(
        (getattr(trial, figure) for trial in trials if trial.contender == key and trial.trained), default=0
    )


def table_of(title: str, trials: list[Trial], note: str) -> Table:
    """Every attempt."""
    table = Table(
        title,
        ("contender", "model", "M parameters", "tokens", "cap MB", "trained", "peak MB", "s/step", "losses"),
        note=note,
    )
    for trial in trials:
        losses = f"{trial.first_loss:.3f} → {trial.last_loss:.3f}" if trial.trained else ""
        table.rows.append(
            [
                contender_named(trial.contender).title,
                trial.model,
                f"{trial.parameters / 1e6:.0f}",
                str(trial.length),
                megabytes(trial.cap_bytes),
                "yes" if trial.trained else "no",
                megabytes(trial.peak_bytes) if trial.trained else "",
                f"{trial.seconds_a_step:.1f}" if trial.trained else "",
                losses,
            ]
        )
    return table


def _models(cap_bytes: int, factors: list[float], console: Console) -> tuple[Table, dict[str, Any]]:
    plain = largest_plain(cap_bytes, console)
    limit = best(plain, "frugal@1", "parameters")
    stored = largest_stored(cap_bytes, limit, factors, console)
    ratio = best(stored, "consumed@1", "parameters") / limit if limit else 0.0
    note = (
        f"Largest that trained: {ratio:.1f} times what PyTorch alone trains (bar ≥ {MODEL_BAR:g}). bfloat16"
        f" parameters, float32 masters, AdamW without foreach, 1 × {SEQUENCE_LENGTH} tokens, {STEPS} steps."
        f" The cap is by {plain[0].cap_name}."
    )
    facts = {"ratio": ratio, "bar": MODEL_BAR, "met": ratio >= MODEL_BAR}
    table = table_of("Largest model under a cap", [*plain, *stored], note)
    return table, {**facts, "trials": [asdict(trial) for trial in (*plain, *stored)]}


def _lengths(cap_bytes: int, console: Console) -> tuple[Table, dict[str, Any]]:
    compile_for(LONG_PAIR, console)
    trials = longest(cap_bytes, console)
    ours, theirs = (best(trials, key, "length") for key in LONG_PAIR)
    ratio = ours / theirs if theirs else float("inf")
    note = (
        f"Tokens of a micro-batch: {ours:,}, DeepSpeed {theirs:,}: {ratio:.2f} times (bar ≥ {LENGTH_BAR:g})."
        " Optimizer state on NVMe on both sides, both ranks under one cap."
    )
    facts = {"ratio": ratio, "bar": LENGTH_BAR, "met": ratio >= LENGTH_BAR}
    return table_of("Longest micro-batch under a cap", trials, note), {
        **facts,
        "trials": [asdict(trial) for trial in trials],
    }


def _context(cap_bytes: int, console: Console) -> tuple[Table, dict[str, Any]]:
    trials = context(cap_bytes, console)
    ours, theirs = (best(trials, key, "length") for key in CONTEXT_PAIR)
    ratio = ours / theirs if theirs else float("inf")
    note = (
        f"Tokens of a sequence: {ours:,}, PyTorch alone {theirs:,}: {ratio:.2f} times (bar ≥"
        f" {CONTEXT_BAR:g}). Dense causal attention of torch on both sides, blocks checkpointed, bfloat16"
        f" parameters, float32 masters, one step. The cap is by {trials[0].cap_name}."
    )
    facts = {"ratio": ratio, "bar": CONTEXT_BAR, "met": ratio >= CONTEXT_BAR}
    table = table_of("Longest sequence under a cap", trials, note)
    return table, {**facts, "trials": [asdict(trial) for trial in trials]}


def main(
    cap: Annotated[float, typer.Option(help="Cap for the largest model, GiB.")] = 2.0,
    factors: Annotated[str, typer.Option(help="Multiples of PyTorch's largest model to try.")] = "10,15,20",
    length_cap: Annotated[
        float, typer.Option(help="Cap of both ranks for the longest sequence, GiB.")
    ] = 20.0,
    context_cap: Annotated[float, typer.Option(help="Cap for the longest checkpointed sequence, GiB.")] = 4.0,
    only: Annotated[str, typer.Option(help="'model', 'length' or 'context'; all by default.")] = "",
) -> None:
    """Find what fits under a cap; write the result."""
    console = terminal()
    measures: dict[str, Callable[[], tuple[Table, dict[str, Any]]]] = {
        "model": lambda: _models(int(cap * 2**30), [float(f) for f in factors.split(",")], console),
        "length": lambda: _lengths(int(length_cap * 2**30), console),
        "context": lambda: _context(int(context_cap * 2**30), console),
    }
    if only and only not in measures:
        raise typer.BadParameter(f"--only: {only!r} given, {', '.join(map(repr, measures))} wanted")
    tables: list[Table] = []
    data: dict[str, Any] = {}
    for name in [only] if only else measures:
        table, data[name] = measures[name]()
        tables.append(table)
    met = all(found["met"] for found in data.values())
    data = {"environment": {**describe(), "NVMe folder": nvme_folder()}, **data}
    conclude(console, "capped", "Under a memory cap", tables, data, [] if met else ["a bar is missed"])


if __name__ == "__main__":
    typer.run(main)
