"""The cost model beside published and own measured steps, and what it says of 64 to 1,024 GPUs.

Run from the repository root: python -m benchmarks.simulation
"""

import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import typer

from benchmarks.harness.environment import describe
from benchmarks.harness.plots import plot_scaling
from benchmarks.harness.report import Table, conclude, terminal
from benchmarks.harness.this_machine import Row, ThisMachine
from zero_ext.plan.simulation import (
    MACHINES,
    TRANSFORMERS,
    Comparison,
    Simulation,
    Training,
    compare_published,
    scaling,
    simulate,
)

WORLD_SIZES = (64, 128, 256, 512, 1024)
SCALED = ("gpt-1t", "dgx2-v100", 5)
LARGE = ("llama-7b", "gpt-175b", "gpt-1t")
SECONDS_BAR = 2.0


def published_table(found: Sequence[Comparison]) -> Table:
    """Published runs."""
    table = Table(
        "Published runs, TFLOP/s a GPU",
        ("run", "published", "simulated", "error", "assumed", "source"),
        note="Recomputed FLOPs included, as the sources count them. Fitted: the machine's matrix efficiency"
        " was chosen by this run. No GPU was at hand: nothing here was run.",
    )
    for one in found:
        cells = [one.run.what, f"{one.run.teraflops:.1f}", f"{one.simulation.flops_per_second / 1e12:.1f}"]
        error = "fitted" if one.run.fitted else f"{one.error:+.1%}"
        table.rows.append([*cells, error, one.run.assumed, one.run.source])
    return table


def own_table(rows: Sequence[Row]) -> Table:
    """Steps of this project on this machine."""
    table = Table(
        "Measured steps of this project",
        ("model and contender", "results", "measured ms", "simulated ms", "error"),
        note="Two ranks of one thread, or one of two (@1). Fitted: a figure of the machine was chosen by this"
        " row. huge@1 is the first step of a process, with 8-bit moments: the model knows neither first"
        " touches nor quantizing, nor what the device sustains over 100 GB. Which of them it is is unknown.",
    )
    for row in rows:
        error = "fitted" if row.fitted else f"{row.error:+.1%}"
        times = (f"{1e3 * row.measured:,.0f}", f"{1e3 * row.simulation.seconds:,.0f}")
        table.rows.append([row.what, row.source, *times, error])
    return table


def scaling_table(found: Sequence[Simulation]) -> Table:
    """The fastest placement that fits at each world size."""
    model, machine, batch = SCALED
    table = Table(
        f"{model} on {machine}, batch of {batch} a GPU",
        ("GPUs", "placement", "s/step", "tokens/s a GPU", "TFLOP/s a GPU", "PFLOP/s", "hidden", "of perfect"),
        note="The fastest placement that fits: tiers of parameters, gradients, optimizer. Activations are"
        " recomputed from outputs kept in host memory. Hidden: the share of all work beside computing that"
        " runs beside something else. Of perfect: tokens/s a GPU against"
        f" {found[0].training.world_size} GPUs. Above 100% is superlinear.",
    )
    for one in found:
        training, rate = one.training, one.flops_per_second
        table.rows.append(
            [
                f"{training.world_size:,}",
                f"{training.stage}: {training.params}, {training.grads}, {training.optimizer}",
                f"{one.seconds:,.0f}",
                f"{one.tokens_per_second:.2f}",
                f"{rate / 1e12:.1f}",
                f"{rate * training.world_size / 1e15:.1f}",
                f"{one.hidden:.0%}",
                f"{one.tokens_per_second / found[0].tokens_per_second:.0%}",
            ]
        )
    return table


def speed_table() -> tuple[Table, dict[str, float]]:
    """How long a simulation of 1,024 ranks takes."""
    table = Table(
        "Simulating 1,024 ranks",
        ("model", "tasks", "seconds", f"< {SECONDS_BAR:.0f} s"),
        note="Ranks are alike, so one is simulated, with what its collectives cost among all. Stragglers are"
        " not modeled.",
    )
    found = {}
    for name in LARGE:
        training = Training(1024, activations="recomputed_host", grads="host", optimizer="host")
        began = time.perf_counter()
        result = simulate(TRANSFORMERS[name].cost(), training, MACHINES["dgx-a100"])
        found[name] = time.perf_counter() - began
        met = "yes" if found[name] < SECONDS_BAR else "NO"
        table.rows.append([name, f"{len(result.timeline.spans):,}", f"{found[name]:.3f}", met])
    return table, found


def summary(one: Simulation) -> dict[str, Any]:
    """A simulation without its timeline."""
    return {
        "training": asdict(one.training),
        "machine": one.hardware.name,
        "seconds": one.seconds,
        "tokens_per_second": one.tokens_per_second,
        "flops_per_second": one.flops_per_second,
        "hidden": one.hidden,
        "busy": one.busy,
        "memory": asdict(one.memory),
        "shortfalls": [str(short) for short in one.shortfalls],
    }


def main() -> None:
    """Simulate, print beside what is known, write the result."""
    console = terminal()
    published, machine = compare_published(), ThisMachine()
    own = machine.rows()
    model, name, batch = SCALED
    scaled = scaling(TRANSFORMERS[model], name, WORLD_SIZES, batch)
    speed, seconds = speed_table()
    tables = [published_table(published), own_table(own), scaling_table(scaled), speed]
    data = {
        "environment": describe(),
        "published": [
            {"run": asdict(one.run), **summary(one.simulation), "error": one.error} for one in published
        ],
        "own": [
            {"what": row.what, "measured": row.measured, "fitted": row.fitted, "error": row.error}
            | summary(row.simulation)
            for row in own
        ],
        "machines": [one.to_mapping() for one in (machine.alone, machine.pair)],
        "scaling": [summary(one) for one in scaled],
        "simulation_seconds": seconds,
    }
    slow = [
        f"{model}: simulated in {elapsed:.2f} s, bar {SECONDS_BAR:g} s"
        for model, elapsed in seconds.items()
        if elapsed >= SECONDS_BAR
    ]
    plot = partial(plot_scaling, scaled, f"{model} on {name}")
    conclude(console, "simulation", "Simulated steps", tables, data, slow, plot=plot)


if __name__ == "__main__":
    typer.run(main)
