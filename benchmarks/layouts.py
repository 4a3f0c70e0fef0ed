"""Pipelined, split and sharded models on 1,024 simulated ranks: bytes and schedules beside the plan.

Run from the repository root: python -m benchmarks.layouts
"""

import typer

from benchmarks.harness.environment import describe
from benchmarks.harness.report import Table, conclude, terminal
from benchmarks.harness.simulated_process import simulated

# Model, lengths of pp, dp and tp, ZeRO stage, micro-batches.
LAYOUTS = (("gpt-175b", (8, 16, 8), 1, 24), ("gpt-1t", (16, 8, 8), 3, 32))


def main() -> None:
    """The first, a middle and the last pipeline stage of each layout; writes the result."""
    console = terminal()
    table = Table(
        "One of 1,024 simulated ranks",
        ("rank", "held GB", "planned GB", "off by", "units", "turns", "under way", "set-up s"),
        note="Parameters, gradients and optimizer state; a turn is a forward with its backward. Three of the "
        "stages; all ranks of a stage are alike.",
    )
    results, failures = [], []
    for name, lengths, zero, micro_batches in LAYOUTS:
        for stage in (0, lengths[0] // 2, lengths[0] - 1):
            try:
                found = simulated(
                    "simulated_layout",
                    f"{name}, stage {stage}",
                    name=name,
                    lengths=lengths,
                    zero=zero,
                    micro_batches=micro_batches,
                    stage=stage,
                )
            except RuntimeError as error:
                failures.append(str(error))
                continue
            held, planned = (sum(found[kind].values()) for kind in ("held", "planned"))
            figures = (f"{held / 1e9:.3f}", f"{planned / 1e9:.3f}", f"{held / planned - 1:+.4%}")
            counts = (str(found[key]) for key in ("units", "turns", "in_flight"))
            where = f"{name} {'x'.join(map(str, lengths))}, ZeRO-{zero}, stage {stage}"
            table.rows.append([where, *figures, *counts, f"{found['seconds']:.1f}"])
            results.append({"layout": where, **found})
    data = {"environment": describe(), "results": results, "failures": failures}
    conclude(console, "layouts", "Layouts", [table], data, failures)


if __name__ == "__main__":
    typer.run(main)
