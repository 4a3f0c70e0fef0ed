"""``zero-ext tune``: a script tried with many configurations, the best one written."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from zero_ext.cli.common_options import OUTPUT, AsJson, ConfigFile, Machine, NvmePath, Sequence
from zero_ext.cli.console import cleaned_up_when_ended, errors_on_stderr, print_json, terminal
from zero_ext.cli.dataclass_options import taking
from zero_ext.config import load_config
from zero_ext.plan.cluster import DEFAULT_MACHINE, ClusterOptions
from zero_ext.plan.models import model_named
from zero_ext.plan.parse_sizes import bytes_of, count_of
from zero_ext.plan.tune import Launch, Prediction, Space, TrialResult, Tuning, run_trial, search
from zero_ext.plan.tune.search_space import placements_of

TIERS = ("device", "host", "nvme")
_AIO_KEYS = ("block_bytes", "queue_depth", "io_threads")


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
    write: Annotated[
        Path,
        typer.Option(help="Write the best configuration to this JSON file.", rich_help_panel=OUTPUT),
    ] = Path("tuned.json")
    results: Annotated[
        Path | None, typer.Option(help="Write every trial to this JSON file.", rich_help_panel=OUTPUT)
    ] = None
    as_json: AsJson = False


@taking(TuneOptions)
def tune(options: TuneOptions) -> None:
    """Which configuration trains my script fastest?

    Runs short trials of the script, each in a process of its own, and writes the fastest configuration. Exit
    status 1 if no trial ran. Options come before the script.
    """
    from zero_ext.cli.planning import tune_report as report

    with errors_on_stderr(), cleaned_up_when_ended():
        space, prediction = _space(options), _prediction(options)
        launch = _launch(options)
        for path in (options.write, options.results):
            if path is not None and not path.absolute().parent.is_dir():
                raise ValueError(f"{path}: its folder does not exist. Make it first.")
        notes = terminal(stderr=options.as_json)

        def tick(one: TrialResult) -> None:
            notes.print(report.line(one), soft_wrap=True)

        found = tune_script(space, launch, prediction, options.most_trials, tick)
        # Before anything is printed, so that the files are there after `| head` too.
        if options.results is not None:
            _write(options.results, report.tuning_as_json(found))
        if found.best is not None:
            _write(options.write, space.config(found.best.point).model_dump(mode="json", exclude_unset=True))
        if options.as_json:
            print_json(report.tuning_as_json(found))
        else:
            report.print_tuning(notes, found)
        if found.best is None:
            raise RuntimeError(
                f"{options.script}: no trial was measured: {report.why_none(found)}. Run the script alone "
                "first."
            )
        notes.print(f"best configuration in {options.write}", soft_wrap=True, markup=False)


def tune_script(
    space: Space,
    launch: Launch,
    prediction: Prediction | None = None,
    most_trials: int | None = None,
    tick: Callable[[TrialResult], None] = lambda one: None,
) -> Tuning:
    """Search ``space`` by trials of the script. ValueError if there is no such script."""
    if not launch.script.is_file():
        raise ValueError(f"SCRIPT: expected a file, got {str(launch.script)!r}. Check the path.")
    return search(
        space, lambda config: run_trial(launch, config), prediction, most_trials=most_trials, tick=tick
    )


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _launch(options: TuneOptions) -> Launch:
    arguments = tuple(options.arguments or ())
    return Launch(options.script, arguments, options.ranks, options.steps, options.timeout)


def _space(options: TuneOptions) -> Space:
    tiers, stages = _items(options.tiers), _counts(options.stages, "--stages", 0)
    unknown = [tier for tier in tiers if tier not in TIERS] + [str(one) for one in stages if one > 3]
    if unknown:
        raise ValueError(
            f"--tiers and --stages: expected some of {', '.join(TIERS)} and 0 to 3, got {unknown[0]!r}. "
            "Name one of "
            "those."
        )
    if "nvme" in tiers and not options.nvme_path:
        raise ValueError("--nvme-path: expected a folder for the tier nvme, got none. Name at least one.")
    base = {} if options.config is None else load_config(options.config).model_dump(exclude_unset=True)
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
    model = model_named(options.model)
    if options.seq is not None:
        model = model.with_sequence(options.seq)
    hardware = ClusterOptions(options.machine).hardware()
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


def _section(text: str) -> tuple[tuple[str, int | str], ...]:
    fields = text.lower().split("x")
    if len(fields) != len(_AIO_KEYS):
        raise ValueError(
            f"--aio: expected block x depth x I/O threads, got {text!r}. Write for example 1MiBx32x1."
        )
    values = [bytes_of(fields[0], "--aio"), *(count_of(item) or 0 for item in fields[1:])]
    section = tuple(zip(_AIO_KEYS, values, strict=True))
    load_config({"aio": dict(section)})
    return section
