"""``zero-ext simulate``: steps on a machine that need not be there, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zero_ext.cli.console import NEGATIVE, errors_on_stderr, print_json, terminal
from zero_ext.cli.options import AsJson, ConfigFile, Experts, Machine, Model, taking
from zero_ext.cli.plan_report import lacks_as_json, training_as_json
from zero_ext.config import load_config
from zero_ext.config.tiers import CAPACITIES
from zero_ext.plan.models import model_named
from zero_ext.plan.simulation import (
    TRANSFORMERS,
    Simulation,
    Training,
    compare_published,
    fastest_placements,
    machine_named,
    nearest_to_fit,
    simulate,
)
from zero_ext.plan.simulation.hardware import DEFAULT_MACHINE
from zero_ext.plan.simulation.training_setup import ACTIVATIONS

_SHOWN = 8
_COLUMNS = (
    *(
        "stage",
        "params",
        "grads",
        "optimizer",
        "activations",
        "s/step",
        "tokens/s per GPU",
        "TFLOP/s per GPU",
    ),
    *("hidden", "busiest", "GPU GB", "host GB", "NVMe GB"),
)


@dataclass(frozen=True)
class SimulateOptions:
    """The options of ``zero-ext simulate``."""

    model: Model = "llama-7b"
    gpus: Annotated[int, typer.Option(min=1, help="GPUs in total.")] = 8
    machine: Machine = DEFAULT_MACHINE
    micro_batch: Annotated[int, typer.Option(min=1, help="Samples per forward of a GPU.")] = 1
    accumulation: Annotated[int, typer.Option(min=1, help="Micro-batches per step.")] = 1
    ep: Experts = 1
    config: ConfigFile = None
    recompute: Annotated[
        bool, typer.Option(help="With --config: activations are recomputed in backward.")
    ] = True
    published: Annotated[
        bool, typer.Option("--published", help="Compare the simulation with published runs instead.")
    ] = False
    as_json: AsJson = False


@taking(SimulateOptions)
def simulate_step(options: SimulateOptions) -> None:
    """How fast would a training step be on hardware that I do not have?

    Lists the fastest placements that fit, or the one placement of --config. Exit status 1 if nothing fits.
    """
    with errors_on_stderr():
        if options.published:
            if options.as_json:
                print_json(_published_as_json())
            else:
                _print_published(terminal())
            return
        found, why = _simulations(options)
        if options.as_json:
            print_json({"placements": [_as_json(one) for one in found], "why_nothing_fits": why})
        elif why is not None:
            raise RuntimeError(why)
        else:
            _print_placements(terminal(), found)
        if not any(one.fits for one in found):
            raise typer.Exit(NEGATIVE)


def _simulations(options: SimulateOptions) -> tuple[list[Simulation], str | None]:
    """Return the placements, or none and what the nearest lacks."""
    # The layers of the planner's models are cut into more tiles than those of published runs.
    shape, hardware = TRANSFORMERS.get(options.model), machine_named(options.machine)
    if shape is None or options.ep > 1:
        model = model_named(options.model).with_experts_over(options.ep).full_cost
    else:
        model = shape.cost()
    if options.config is not None:
        activations = ACTIVATIONS[options.recompute]
        training = Training.of_config(load_config(options.config), options.gpus, activations)
        return [simulate(model, training, hardware)], None
    training = Training(
        options.gpus, micro_batch=options.micro_batch, accumulation_steps=options.accumulation
    )
    found = fastest_placements(model, training, hardware)[:_SHOWN]
    if found:
        return found, None
    short = "; ".join(map(str, nearest_to_fit(model, training, hardware).shortfalls))
    gpus = f"{options.gpus} GPUs of {hardware.name}"
    return [], f"{options.model} fits no placement on {gpus}. The nearest lacks {short}."


def _as_json(one: Simulation) -> dict[str, Any]:
    """Return everything that a row of the table shows, in bytes and seconds."""
    return {
        **training_as_json(one.training),
        "step_seconds": one.seconds,
        "tokens_per_second_per_gpu": one.tokens_per_second,
        "flops_per_second_per_gpu": one.flops_per_second,
        "optimizer_type": one.training.optimizer_type,
        "optimizer_flops": one.optimizer_flops,
        "hidden": one.hidden,
        "busiest": one.bound_by,
        "busy_seconds": one.busy,
        "bytes": {tier: one.memory.total(tier) for tier in CAPACITIES},
        **lacks_as_json(one.shortfalls),
    }


def _print_placements(console: Console, found: Sequence[Simulation]) -> None:
    """Print one line per simulation, and what does not fit below."""
    table = Table(*_COLUMNS)
    for one in found:
        table.add_row(
            str(one.training.stage),
            *one.training.tiers.values(),
            one.training.activations,
            f"{one.seconds:.3g}",
            f"{one.tokens_per_second:,.1f}",
            f"{one.flops_per_second / 1e12:.1f}",
            f"{one.hidden:.0%}",
            one.bound_by,
            *(f"{one.memory.total(tier) / 1e9:,.1f}" for tier in CAPACITIES),
        )
    console.print(table)
    for short in (short for one in found for short in one.shortfalls):
        console.print(f"[red]does not fit: {escape(str(short))}", soft_wrap=True)


def _print_published(console: Console) -> None:
    """Print published runs next to their simulations."""
    table = Table("run", "published", "simulated", "error", "source", title="TFLOP/s per GPU")
    for comparison in compare_published():
        run = comparison.run
        table.add_row(
            escape(run.what),
            f"{run.teraflops:.1f}",
            f"{comparison.simulation.flops_per_second / 1e12:.1f}",
            "fitted" if run.fitted else f"{comparison.error:+.1%}",
            escape(run.source + (f"; assumed: {run.assumed}" if run.assumed else "")),
        )
    console.print(table)


def _published_as_json() -> dict[str, Any]:
    """Return the same in FLOP/s."""
    return {
        "runs": [
            {
                "run": comparison.run.what,
                "source": comparison.run.source,
                "assumed": comparison.run.assumed,
                "published_flops_per_second": 1e12 * comparison.run.teraflops,
                "simulated_flops_per_second": comparison.simulation.flops_per_second,
                "fitted": comparison.run.fitted,
                "error": comparison.error,
            }
            for comparison in compare_published()
        ]
    }
