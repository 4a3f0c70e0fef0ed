"""Steps over a slow network of two nodes: uncompressed Adam against 1-bit Adam, ZeRO-3 against ZeRO++.

Run from the repository root: python -m benchmarks.compressed [--what 34m] [--rounds 3] [--times 8]
The links are emulated (network namespaces and tc, as root), or modeled where that is not permitted.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Annotated, Any

import typer

from benchmarks.harness.compressed_modes import mode_named
from benchmarks.harness.environment import describe
from benchmarks.harness.report import Table, conclude, terminal
from benchmarks.harness.slow_steps import NODES, RANKS_PER_NODE, Duel, Side, run_duel, team_on
from benchmarks.harness.text_model import text_run
from benchmarks.harness.token_bucket import AnyNetwork, open_network

GIGABIT = 1e9
ALONE_BAR = 10.0
# What is set side by side, and how many times faster the second must be.
PAIRS = (("adam", "onebit_adam", 3.0), ("adam1", "onebit_adam1", 3.0), ("zero3", "zeropp", 2.0))


def alone(network: AnyNetwork, elements: int, repeats: int) -> dict[str, float]:
    """Median seconds of each exchange of a buffer of so many elements at 1 Gbit/s."""
    network.limit(GIGABIT)
    with team_on("exchange", network, "benchmarks.harness.exchange_rank") as team:
        team.ask("start", elements=elements)
        found = {}
        for command in ("half", "engine_half", "onebit", "packed_onebit"):
            times = team.ask(command, repeats=repeats)
            found[command] = statistics.median(max(of_repeat) for of_repeat in zip(*times, strict=True))
    return found


def duels_table(duels: list[Duel], network: str) -> Table:
    """Step times."""
    table = Table(
        "Step time over a slow link",
        (
            *("uncompressed", "compressed", "Mbit/s", "free", "compressed, free", "communication / compute"),
            *("limited", "compressed, limited", "times faster", "at least"),
        ),
        note=f"Milliseconds a step, medians. Times faster: median of the rounds' ratios (95% interval). "
        f"{NODES} nodes of {RANKS_PER_NODE} ranks of one thread; "
        f"{network}. Free: links without a limit. Communication is what the limit adds to the uncompressed "
        "step, compute the step without a limit.",
    )
    for duel in duels:
        sides = (duel.plain, duel.compressed)
        free, limited = (
            [f"{1e3 * statistics.median(getattr(side, name)):,.0f}" for side in sides]
            for name in ("free", "limited")
        )
        titles = [mode_named(side.mode).title for side in sides]
        found = [duel.speedup.text(), f"{duel.bar:g}"]
        rate, share = f"{duel.bits_per_second / 1e6:,.1f}", f"{duel.communication:.1f}"
        table.rows.append([*titles, rate, *free, share, *limited, *found])
    return table


def bytes_table(duels: list[Duel], parameters: int) -> Table:
    """What a step sends."""
    table = Table(
        "Bytes of a step",
        (
            "mode",
            "kind",
            "sent, MB",
            "between nodes, MB",
            "bytes a parameter between nodes",
            "on the links, MB",
        ),
        note="Sent by all ranks together, between nodes by one node, scales and padding included. On the "
        "links: what left a node by the kernel's count, with headers and acknowledgements.",
    )
    for side in [side for duel in duels for side in (duel.plain, duel.compressed)]:
        title = mode_named(side.mode).title
        for kind, sent in side.sent.items():
            crossing = f"{side.crossing.get(kind, 0) / NODES / 1e6:,.3f}"
            table.rows.append([title, kind, f"{sent / 1e6:,.3f}", crossing, "", ""])
        links = "" if side.on_links is None else f"{side.on_links / 1e6:,.3f}"
        node = side.crossing_of_a_node
        total = [f"{sum(side.sent.values()) / 1e6:,.3f}", f"{node / 1e6:,.3f}", f"{node / parameters:.4f}"]
        table.rows.append([title, "all", *total, links])
    return table


def alone_table(seconds: dict[str, float], elements: int) -> Table:
    """Exchanges without a model."""
    table = Table(
        "Communication alone at 1 Gbit/s",
        ("exchange", "ms", "of gloo's all-reduce"),
        note=f"{elements:,} elements, medians of the slowest rank. Signs are messages alone, packed before.",
    )
    names = {
        "half": "all-reduce in fp16, gloo's",
        "engine_half": "all-reduce in fp16, the engine's",
        "onebit": "signs to owners, sums' signs to all",
        "packed_onebit": "the same with packing and errors",
    }
    for command, title in names.items():
        share = seconds[command] / seconds["half"]
        table.rows.append([title, f"{1e3 * seconds[command]:,.1f}", f"{share:.3f}"])
    return table


def main(
    what: Annotated[str, typer.Option(help="The model: 8m-bytes, 34m or tiny.")] = "34m",
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each side.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Of a turn.")] = 2,
    times: Annotated[float, typer.Option(help="Compute that uncompressed communication shall take.")] = 8.0,
    elements: Annotated[int, typer.Option(min=1, help="Of the buffer that is exchanged alone.")] = 34_000_000,
    only: Annotated[str, typer.Option(help="Compressed modes, comma-separated; empty: all.")] = "",
) -> None:
    """Measure steps and exchanges over slow links; write the result."""
    console = terminal()
    duels = [
        Duel(Side(plain), Side(compressed), bar)
        for plain, compressed, bar in PAIRS
        if not only or compressed in only.split(",")
    ]
    with open_network(NODES, RANKS_PER_NODE) as network:
        console.print(f"links: {network.name}", highlight=False)
        for duel in duels:
            run_duel(duel, network, what, rounds, steps, times, console)
        seconds = alone(network, elements, repeats=max(3, rounds))
    failures = [failure for duel in duels for failure in duel.failures()]
    shorter = seconds["half"] / seconds["onebit"]
    if shorter < ALONE_BAR:
        failures.append(f"communication alone is {shorter:.1f} times shorter as signs, {ALONE_BAR:g} wanted")
    data: dict[str, Any] = {"environment": describe(), "links": network.name, "alone": seconds}
    data["times_shorter_alone"] = shorter
    data["results"] = [
        asdict(duel)
        | {"speedup": asdict(duel.speedup), "communication": duel.communication, "met": not duel.failures()}
        for duel in duels
    ]
    tables = [
        duels_table(duels, network.name),
        bytes_table(duels, text_run(what).shape.parameters),
        alone_table(seconds, elements),
    ]
    conclude(console, "compressed", "Compressed communication over slow links", tables, data, failures)


if __name__ == "__main__":
    typer.run(main)
