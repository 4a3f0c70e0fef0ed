"""Tables of simulated steps for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zero_ext.config import load_config
from zero_ext.plan.plan_entry import TIERS
from zero_ext.plan.simulation import (
    Simulation,
    Training,
    compare_published,
    fastest_placements,
    machine_named,
    nearest_to_fit,
    simulate,
    transformer_named,
)

SHOWN = 8
COLUMNS = (
    "stage",
    "params",
    "grads",
    "optimizer",
    "activations",
    "s/step",
    "tokens/s per GPU",
    "TFLOP/s per GPU",
    "hidden",
    "busiest",
    "GPU GB",
    "host GB",
    "NVMe GB",
)


def find_placements(model: str, machine: str, training: Training) -> list[Simulation]:
    """Return the fastest placements of ``training`` on a machine; empty if nothing fits."""
    cost, hardware = transformer_named(model).cost(), machine_named(machine)
    return fastest_placements(cost, training, hardware)[:SHOWN]


def why_nothing_fits(model: str, machine: str, training: Training) -> str:
    """Return what the nearest placement lacks."""
    cost, hardware = transformer_named(model).cost(), machine_named(machine)
    short = "; ".join(map(str, nearest_to_fit(cost, training, hardware).shortfalls))
    gpus = f"{training.world_size} GPUs of {hardware.name}"
    return f"{model} fits no placement on {gpus}. The nearest lacks {short}."


def simulate_config(model: str, machine: str, gpus: int, config: Path, recompute: bool) -> Simulation:
    """Return one step as a configuration has it. Raises ValueError (ConfigError) for one that does not
    fit.
    """
    training = Training.of_config(load_config(config), gpus, "recomputed" if recompute else "saved")
    return simulate(transformer_named(model).cost(), training, machine_named(machine))


def simulation_as_json(one: Simulation) -> dict[str, Any]:
    """Return everything that a row of the table shows, in bytes and seconds."""
    training = one.training
    return {
        "stage": training.stage,
        "params": training.params,
        "grads": training.grads,
        "optimizer": training.optimizer,
        "activations": training.activations,
        "micro_batch": training.micro_batch,
        "accumulation_steps": training.accumulation_steps,
        "step_seconds": one.seconds,
        "tokens_per_second_per_gpu": one.tokens_per_second,
        "flops_per_second_per_gpu": one.flops_per_second,
        "hidden": one.hidden,
        "busiest": one.bound_by,
        "busy_seconds": one.busy,
        "bytes": {tier: one.memory.total(tier) for tier in TIERS},
        "fits": one.fits,
        "lacks": {short.tier: short.needed - short.available for short in one.shortfalls},
    }


def print_placements(console: Console, found: Sequence[Simulation]) -> None:
    """One line per simulation, and what does not fit below."""
    table = Table(*COLUMNS)
    for one in found:
        training = one.training
        table.add_row(
            str(training.stage),
            training.params,
            training.grads,
            training.optimizer,
            training.activations,
            f"{one.seconds:.3g}",
            f"{one.tokens_per_second:,.1f}",
            f"{one.flops_per_second / 1e12:.1f}",
            f"{one.hidden:.0%}",
            one.bound_by,
            f"{one.memory.total('device') / 1e9:,.1f}",
            f"{one.memory.total('host') / 1e9:,.1f}",
            f"{one.memory.total('nvme') / 1e9:,.1f}",
        )
    console.print(table)
    for short in (short for one in found for short in one.shortfalls):
        console.print(f"[red]does not fit: {escape(str(short))}", soft_wrap=True)


def print_published(console: Console) -> None:
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


def published_as_json() -> dict[str, Any]:
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
