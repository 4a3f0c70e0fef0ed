"""Tables of simulated steps for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zero_ext.config import load_config
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
    "tokens/s a rank",
    "TFLOP/s a rank",
    "hidden",
    "busiest",
    "device GB",
    "host GB a node",
    "NVMe GB a node",
)


def find_placements(
    model: str, machine: str, ranks: int, micro_batch: int, accumulation: int
) -> list[Simulation]:
    """The fastest placements; ValueError saying what lacks where nothing fits."""
    cost, hardware = transformer_named(model).cost(), machine_named(machine)
    training = Training(ranks, micro_batch=micro_batch, accumulation_steps=accumulation)
    found = fastest_placements(cost, training, hardware)
    if not found:
        nearest = nearest_to_fit(cost, training, hardware)
        short = "; ".join(map(str, nearest.shortfalls))
        raise ValueError(
            f"{model} fits no placement on {ranks} ranks of {hardware.name}; the nearest lacks {short}"
        )
    return found[:SHOWN]


def simulate_config(model: str, machine: str, ranks: int, config: Path, recompute: bool) -> Simulation:
    """One step as a configuration has it. Raises ValueError (ConfigError) for one that does not fit."""
    training = Training.of_config(load_config(config), ranks, "recomputed" if recompute else "saved")
    return simulate(transformer_named(model).cost(), training, machine_named(machine))


def print_placements(console: Console, found: Sequence[Simulation]) -> None:
    """One line a simulation, and what does not fit below."""
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
    """Published runs beside the model."""
    table = Table("run", "published", "simulated", "error", "source", title="TFLOP/s a GPU")
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
