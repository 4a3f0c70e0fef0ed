"""The command ``zero-ext simulate`` and its options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from zero_ext.cli.common_options import AsJson, ConfigFile, Machine
from zero_ext.cli.console import NEGATIVE, errors_on_stderr, print_json, terminal
from zero_ext.cli.dataclass_options import taking
from zero_ext.plan.cluster import DEFAULT_MACHINE

if TYPE_CHECKING:
    from zero_ext.plan.simulation import Simulation


@dataclass(frozen=True)
class SimulateOptions:
    """The options of ``zero-ext simulate``."""

    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A preset such as llama-7b, gpt-175b or gpt-1t.")
    ] = "llama-7b"
    gpus: Annotated[int, typer.Option(min=1, help="GPUs in total.")] = 8
    machine: Machine = DEFAULT_MACHINE
    micro_batch: Annotated[int, typer.Option(min=1, help="Samples per forward of a GPU.")] = 1
    accumulation: Annotated[int, typer.Option(min=1, help="Micro-batches per step.")] = 1
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
    from zero_ext.cli.planning import simulation_report as report

    with errors_on_stderr():
        if options.published:
            if options.as_json:
                print_json(report.published_as_json())
            else:
                report.print_published(terminal())
            return
        found, why = _simulations(options)
        if options.as_json:
            placements = [report.simulation_as_json(one) for one in found]
            print_json({"placements": placements, "why_nothing_fits": why})
        elif found:
            report.print_placements(terminal(), found)
        if not found and not options.as_json:
            raise RuntimeError(why)
        if not any(one.fits for one in found):
            raise typer.Exit(NEGATIVE)


def _simulations(options: SimulateOptions) -> tuple[list[Simulation], str | None]:
    """Return the placements, or none and the reason."""
    from zero_ext.cli.planning import simulation_report as report
    from zero_ext.plan.simulation import Training

    model, machine = options.model, options.machine
    if options.config is not None:
        return [report.simulate_config(model, machine, options.gpus, options.config, options.recompute)], None
    training = Training(
        options.gpus, micro_batch=options.micro_batch, accumulation_steps=options.accumulation
    )
    found = report.find_placements(model, machine, training)
    return found, None if found else report.why_nothing_fits(model, machine, training)
