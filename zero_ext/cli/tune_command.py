"""``zero-ext tune``: a script tried with many configurations, the best one written."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zero_ext.cli.console import (
    cleaned_up_when_ended,
    errors_on_stderr,
    print_json,
    said,
    terminal,
    write_json,
)
from zero_ext.cli.options import AsJson, ConfigFile, Machine, NvmePath, Sequence, output, taking
from zero_ext.config import ZeroConfig, load_config
from zero_ext.config.tiers import CAPACITIES, is_stored
from zero_ext.plan.models import model_named
from zero_ext.plan.parse_sizes import bytes_of, count_of
from zero_ext.plan.simulation.hardware import DEFAULT_MACHINE, machine_named
from zero_ext.plan.trial import Launch, run_trial
from zero_ext.plan.tune import AioSection, Prediction, Space, TrialResult, Tuning, placements_of, search

_AIO_KEYS = ("block_bytes", "queue_depth", "io_threads")
_SHOWN_REASON = 90


@dataclass(frozen=True)
class TuneOptions:
    """The options of ``zero-ext tune``; they come before the script and its own arguments."""

    script: Annotated[
        Path, typer.Argument(metavar="SCRIPT", help="A training script that uses zero_ext.plan.Trial.")
    ]
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script.")
    ] = None
    config: ConfigFile = None
    ranks: Annotated[int, typer.Option(min=1, help="Processes per trial, started by torchrun.")] = 1
    stages: Annotated[str, typer.Option(help="ZeRO stages to try.")] = "1,2,3"
    tiers: Annotated[str, typer.Option(help="Tiers to try: device, host, nvme.")] = "device"
    micro_batches: Annotated[str, typer.Option(help="Samples per forward of a rank.")] = "1,2,4,8"
    unit_elements: Annotated[
        str, typer.Option(help="Elements per bucket. In stage 3, elements that are gathered ahead.")
    ] = "16M"
    aio: Annotated[
        str, typer.Option(help="Block x queue depth x I/O threads, such as 1MiBx32x1, for tiers on NVMe.")
    ] = ""
    nvme_path: NvmePath = None
    steps: Annotated[int, typer.Option(min=1, help="Measured steps per trial, after two more.")] = 5
    timeout: Annotated[float, typer.Option(min=1, help="Seconds per trial.")] = 300.0
    most_trials: Annotated[
        int | None, typer.Option(min=1, help="Limit of the number of trials. No limit by default.")
    ] = None
    model: Annotated[
        str | None,
        typer.Option(help="The model of the script, as for `plan`: leaves out trials that cannot win."),
    ] = None
    seq: Sequence = None
    machine: Machine = DEFAULT_MACHINE
    recompute: Annotated[bool, typer.Option(help="With --model: activations are recomputed in backward.")] = (
        False
    )
    write: Annotated[Path, output("Write the best configuration to this JSON file.")] = Path("tuned.json")
    results: Annotated[Path | None, output("Write every trial to this JSON file.")] = None
    as_json: AsJson = False


@taking(TuneOptions)
def tune(options: TuneOptions) -> None:
    """Which configuration trains my script fastest?

    Runs short trials of the script, each in a process of its own, and writes the fastest configuration. Exit
    status 1 if no trial ran. Options come before the script.
    """
    with errors_on_stderr(), cleaned_up_when_ended():
        space, prediction = _space(options), _prediction(options)
        arguments = tuple(options.arguments or ())
        launch = Launch(options.script, arguments, options.ranks, options.steps, options.timeout)
        for path in (options.write, options.results):
            if path is not None and not path.absolute().parent.is_dir():
                raise ValueError(f"{path}: its folder does not exist. Make it first.")
        if not launch.script.is_file():
            raise ValueError(f"SCRIPT: expected a file, got {str(launch.script)!r}. Check the path.")
        notes = terminal(stderr=options.as_json)
        found = search(
            space,
            lambda config: run_trial(launch, config),
            prediction,
            most_trials=options.most_trials,
            tick=lambda one: notes.print(_line(one), soft_wrap=True),
        )
        # Before anything is printed, so that the files are there after `| head` too.
        if options.results is not None:
            write_json(options.results, _tuning_as_json(found))
        if found.best is not None:
            write_json(options.write, said(space.config(found.best.point)))
        if options.as_json:
            print_json(_tuning_as_json(found))
        else:
            _print_tuning(notes, found)
        if found.best is None:
            # What happened most often.
            reasons = Counter(f"{one.outcome.fate}: {one.outcome.reason}" for one in found.measured)
            reason = reasons.most_common(1)[0][0] if reasons else "there was nothing to try"
            raise RuntimeError(
                f"{options.script}: no trial was measured: {reason}. Run the script alone first."
            )
        notes.print(f"best configuration in {options.write}", soft_wrap=True, markup=False)


def _space(options: TuneOptions) -> Space:
    tiers, stages = _items(options.tiers), _counts(options.stages, "--stages", 0)
    unknown = [tier for tier in tiers if tier not in CAPACITIES] + [str(one) for one in stages if one > 3]
    if unknown:
        raise ValueError(
            f"--tiers and --stages: expected some of {', '.join(CAPACITIES)} and 0 to 3, got {unknown[0]!r}. "
            "Name one of those."
        )
    if is_stored(*tiers) and not options.nvme_path:
        raise ValueError("--nvme-path: expected a folder for the tier nvme, got none. Name at least one.")
    base = load_config(options.config).model_dump(exclude_unset=True)
    return Space(
        placements_of(stages, tiers),
        _counts(options.micro_batches, "--micro-batches", 1),
        _counts(options.unit_elements, "--unit-elements", 1),
        tuple(_section(item) for item in _items(options.aio)) or ((),),
        base,
        options.ranks,
        tuple(options.nvme_path or ()),
    )


def _prediction(options: TuneOptions) -> Prediction | None:
    if options.model is None:
        return None
    model, hardware = model_named(options.model, options.seq), machine_named(options.machine)
    return Prediction(model, hardware, options.ranks, options.recompute)


def _items(text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(",") if item.strip())


def _counts(text: str, option: str, least: int) -> tuple[int, ...]:
    found = []
    for item in _items(text):
        count = 0 if item == "0" else count_of(item)
        if count is None or count < least:
            raise ValueError(f"{option}: expected whole numbers from {least}, got {item!r}. Correct it.")
        found.append(count)
    if not found:
        raise ValueError(f"{option}: expected at least one number, got {text!r}. Write for example 1,2.")
    return tuple(sorted(set(found)))


def _section(text: str) -> AioSection:
    fields = text.lower().split("x")
    if len(fields) != len(_AIO_KEYS):
        raise ValueError(
            f"--aio: expected block x depth x I/O threads, got {text!r}. Write for example 1MiBx32x1."
        )
    values = [bytes_of(fields[0], "--aio"), *(count_of(item) or 0 for item in fields[1:])]
    section = tuple(zip(_AIO_KEYS, values, strict=True))
    ZeroConfig.from_mapping({"aio": dict(section)})
    return section


def _line(one: TrialResult) -> str:
    """Return a trial as it ended."""
    point, outcome = escape(str(one.point)), one.outcome
    if outcome.fate == "measured":
        return f"{point}: {outcome.samples_per_second:,.4g} samples/s"
    return f"[dim]{point}: {_fate(one)}, {escape(outcome.reason)}"


def _fate(one: TrialResult) -> str:
    return one.outcome.fate if one.tried else "left out"


def _print_tuning(console: Console, tuning: Tuning) -> None:
    """Print every point that was looked at, the fastest first."""
    table = Table("stage", "placement", "micro-batch", "units", "aio", "samples/s", "of best", "seconds")
    best = tuning.best
    top = best.outcome.samples_per_second if best is not None else 1.0
    for one in sorted(tuning.measured, key=lambda one: -one.outcome.samples_per_second):
        point, outcome = one.point, one.outcome
        measured = outcome.fate == "measured"
        table.add_row(
            str(point.placement.stage),
            escape(point.placement.label),
            str(point.micro_batch),
            f"{point.unit_elements:,}",
            " ".join(str(value) for _, value in point.aio),
            f"{outcome.samples_per_second:,.4g}"
            if measured
            else f"{_fate(one)}: {escape(outcome.reason[:_SHOWN_REASON])}",
            f"{outcome.samples_per_second / top:.0%}" if measured else "",
            f"{outcome.seconds:.1f}" if one.tried else "",
            style="bold green" if one is best else "" if measured else "dim",
        )
    console.print(table)
    console.print(f"{tuning.trials} trials of {len([*tuning.space])} points")


def _tuning_as_json(tuning: Tuning) -> dict[str, Any]:
    """Return every point with what became of it."""
    best = tuning.best
    return {
        "points": len([*tuning.space]),
        "trials": tuning.trials,
        "best": None if best is None else _as_json(best),
        "measured": [_as_json(one) for one in tuning.measured],
    }


def _as_json(one: TrialResult) -> dict[str, Any]:
    point, outcome = one.point, one.outcome
    return {
        **point.placement.options,
        "micro_batch": point.micro_batch,
        "unit_elements": point.unit_elements,
        "aio": dict(point.aio),
        "tried": one.tried,
        "fate": outcome.fate,
        "samples_per_second": outcome.samples_per_second,
        "reason": outcome.reason,
        "seconds": outcome.seconds,
    }
