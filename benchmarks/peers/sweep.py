"""Sweep the documented knobs of each peer, so that benchmarks meet peers at their best.

All peers have the same budget: settings tried, rounds and steps. Knob by knob, each setting runs in turn
with the best one so far and replaces it if it is faster by the median and trains alike. At the end the best
one runs in turn with the defaults and has to be faster again. The choice and all trials are written to
`benchmarks/peers/tuned_settings`, which contenders read.

Run from the repository root: python -m benchmarks.peers.sweep [--models 34m] [--only ddp,fsdp2]
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import typer

from benchmarks.harness.duel import Record, run_in_turn
from benchmarks.harness.environment import describe, total_bytes
from benchmarks.harness.matches import MEMORY_SHARE, expected_bytes, order_of_round
from benchmarks.harness.ranks import TeamFailure
from benchmarks.harness.report import Table, terminal
from benchmarks.harness.shapes import shape_named
from benchmarks.harness.statistics import agree, largest_difference, ratio_of_rounds
from benchmarks.peers import tuned_settings
from benchmarks.peers.contenders import CONTENDERS, Contender, with_settings
from benchmarks.peers.deepspeed_operators import compile_for
from benchmarks.peers.knobs import knobs_of
from benchmarks.peers.tuned_settings import Settings

SWEPT = (
    "ddp,fsdp2,fsdp2-keep,deepspeed1,deepspeed2,deepspeed3,deepspeed3-host,deepspeed3-nvme,deepspeed3-stored"
)
# A setting that is faster by less than this is not told apart from noise.
MARGIN = 0.01
Outcome = Literal["better", "not better", "losses differ", "failed"]
BEST, CANDIDATE = "best", "candidate"


@dataclass(frozen=True)
class Budget:
    """What every peer has: settings that are tried beyond the defaults, and turns of each comparison."""

    settings: int
    rounds: int
    steps: int
    warm_up: int


@dataclass(frozen=True)
class Trial:
    """One setting against the best before it; `ratio` of times in turn is None where it failed."""

    knob: str
    settings: Settings
    outcome: Outcome
    ratio: float | None = None
    seconds: tuple[float, ...] = ()
    best_seconds: tuple[float, ...] = ()
    loss_difference: float | None = None
    failure: str = ""


def judge(knob: str, settings: Settings, records: dict[str, Record]) -> Trial:
    """Compare a candidate with the best before it, both of the same rounds.

    The first loss is that of the same weights and has to be the same number. Later ones may differ as the
    sums of a norm in another order do, and have to agree as those of different peers.
    """
    candidate, best = records[CANDIDATE], records[BEST]
    ratio = ratio_of_rounds(candidate.seconds, best.seconds).median
    alike = candidate.losses[0] == best.losses[0] and agree(candidate.losses, best.losses)
    faster = ratio < 1 - MARGIN
    return Trial(
        knob,
        settings,
        ("better" if faster else "not better") if alike else "losses differ",
        ratio,
        tuple(candidate.seconds),
        tuple(best.seconds),
        largest_difference(candidate.losses, best.losses),
    )


def sweep(contender: Contender, model: str, budget: Budget, progress: Callable[[str], None]) -> list[Trial]:
    """Try settings until the budget is spent; the last trial is the choice against the defaults, if it is
    another one.

    TeamFailure or MemoryError if the contender does not run with its defaults, or not with its choice.
    """

    def compare(knob: str, best: Settings, settings: Settings) -> Trial:
        sides = {BEST: with_settings(contender, best), CANDIDATE: with_settings(contender, settings)}
        progress(f"{model}: {contender.key}, {knob}: {_shown(settings)}")
        return judge(knob, settings, run(sides, model, budget))

    run_in_turn((BEST,), model, 0, 1, 1, _silent, {BEST: with_settings(contender, {})})
    both = 2 * expected_bytes((contender.key,), shape_named(model))
    run = run_resident if both <= MEMORY_SHARE * total_bytes() else run_anew
    best: Settings = {}
    trials: list[Trial] = []
    for knob in knobs_of(contender):
        base = best
        for alternative in knob.alternatives[: budget.settings - len(trials)]:
            settings = {**base, **alternative}
            try:
                trials.append(compare(knob.name, best, settings))
            except (TeamFailure, MemoryError) as failure:
                trials.append(Trial(knob.name, settings, "failed", failure=str(failure)[-2000:]))
            if trials[-1].outcome == "better":
                best = settings
    return [*trials, compare("choice", {}, best)] if best else trials


def run_resident(sides: dict[str, Contender], model: str, budget: Budget) -> dict[str, Record]:
    """All rounds of sides that stay in memory simultaneously."""
    turns = (budget.rounds, budget.steps, budget.warm_up)
    return run_in_turn(tuple(sides), model, *turns, _silent, sides)


def run_anew(sides: dict[str, Contender], model: str, budget: Budget) -> dict[str, Record]:
    """All rounds of sides that need too much memory for that: each turn starts and warms up its own ranks."""
    records = {side: Record() for side in sides}
    for number in range(budget.rounds):
        for side in order_of_round(tuple(sides), number):
            turn = run_resident({side: sides[side]}, model, replace(budget, rounds=1))[side]
            records[side].seconds += turn.seconds
            records[side].losses += turn.losses
    return records


def chosen(trials: Sequence[Trial]) -> Settings:
    """The choice, or the defaults if it is not faster than they are."""
    last = trials[-1] if trials else None
    return last.settings if last and last.knob == "choice" and last.outcome == "better" else {}


def _silent(_: str) -> None:
    """The sweep reports its own progress."""


def _shown(settings: Settings) -> str:
    shown = (f"{path.rpartition('.')[2]} {value}" for path, value in settings.items())
    return ", ".join(shown) or "defaults"


def trials_table(model: str, contender: Contender, trials: Sequence[Trial]) -> Table:
    """All trials of a peer and its choice."""
    table = Table(
        f"{contender.title}, {model}: {_shown(chosen(trials))}",
        ("settings", "knob", "ms/step", "best before, ms", "ratio", "outcome"),
    )
    for trial in trials:
        times = [f"{1e3 * median(each):.1f}" if each else "" for each in (trial.seconds, trial.best_seconds)]
        ratio = "" if trial.ratio is None else f"{trial.ratio:.3f}"
        table.rows.append([_shown(trial.settings), trial.knob, *times, ratio, trial.outcome])
    return table


def recorded(contender: Contender, trials: Sequence[Trial], budget: Budget) -> dict[str, Any]:
    """What the file has of a peer on a model."""
    return {
        "settings": chosen(trials),
        "version": tuned_settings.package_version(contender.family),
        "budget": asdict(budget),
        "trials": [asdict(trial) for trial in trials],
        "environment": describe(),
    }


def main(
    models: Annotated[str, typer.Option(help="Comma-separated shapes: tiny, 34m, 239m.")] = "34m,239m",
    only: Annotated[str, typer.Option(help="Comma-separated contenders.")] = SWEPT,
    settings: Annotated[int, typer.Option(min=1, help="Settings of each peer beyond the defaults.")] = 24,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each comparison.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of a side in a round.")] = 3,
    warm_up: Annotated[int, typer.Option(min=1, help="Steps of each side before the first round.")] = 3,
    output: Annotated[
        Path, typer.Option(help="Folder of choices and trials, a file per model.")
    ] = tuned_settings.FOLDER,
) -> None:
    """Find the best settings of each peer and record them, after each peer."""
    console, budget, failures = terminal(), Budget(settings, rounds, steps, warm_up), []
    try:
        shapes = [shape_named(name).name for name in models.split(",")]
        contenders = [_peer_named(key) for key in only.split(",")]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    compile_for([contender.key for contender in contenders], console)
    for model in shapes:
        for contender in contenders:
            with console.status("starting") as status:
                try:
                    trials = sweep(contender, model, budget, status.update)
                except (TeamFailure, MemoryError) as failure:
                    failures.append(f"{model}, {contender.key}: {failure}")
                    continue
            trials_table(model, contender, trials).show(console)
            tuned_settings.record(model, contender.key, recorded(contender, trials, budget), output)
    for line in failures:
        console.print(f"FAILED {line}", highlight=False)
    if failures:
        raise typer.Exit(1)


def _peer_named(key: str) -> Contender:
    if key not in CONTENDERS:
        raise ValueError(f"unknown contender {key!r}; known: {', '.join(CONTENDERS)}")
    knobs_of(CONTENDERS[key])
    return CONTENDERS[key]


if __name__ == "__main__":
    typer.run(main)
