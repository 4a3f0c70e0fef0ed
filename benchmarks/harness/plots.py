"""Plots of the results: state bytes per stage and world size, tokens/s over the number of GPUs, costs of a
rank over the number of ranks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.formula import STATE_KINDS
from benchmarks.harness.rank_cost_curve import COSTS, growth, value
from zero_ext.config.plot_colors import GRAY, KINDS
from zero_ext.plan.simulation import Simulation

_COLORS = {**KINDS, "other": GRAY}


def plot_state_bytes(accounts: list[dict[str, Any]], path: Path) -> Path:
    """Draw one bar per account, stacked by state kind, the formula as a black line; returns `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(max(6.0, 0.9 * len(accounts)), 4.5))
    for position, account in enumerate(accounts):
        base = 0.0
        bars = {kind: account["breakdown"][kind] for kind in STATE_KINDS}
        bars["other"] = account["total"] - account["state"]
        for kind, count in bars.items():
            label = kind if position == 0 else ""
            axes.bar(position, count / 1e6, bottom=base, color=_COLORS[kind], label=label, width=0.7)
            base += count / 1e6
        formula = sum(account["formula"].values()) / 1e6
        label = "formula" if position == 0 else ""
        axes.hlines(formula, position - 0.42, position + 0.42, colors="black", label=label)
    labels = [f"stage {account['stage']}\n{account['ranks']} ranks" for account in accounts]
    axes.set_xticks(range(len(accounts)), labels, fontsize=8)
    axes.set_ylabel("MB a rank")
    axes.set_title(f"Model state a rank, Llama {accounts[0]['model']}, measured")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path


def plot_scaling(found: Sequence[Simulation], title: str, path: Path) -> Path:
    """Draw simulated tokens/s a GPU over the number of GPUs, level for perfect scaling; returns `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.0, 4.0))
    ranks = [one.training.world_size for one in found]
    rates = [one.tokens_per_second for one in found]
    axes.plot(ranks, rates, marker="o", color=_COLORS["params"], label="simulated")
    axes.hlines(rates[0], ranks[0], ranks[-1], colors="black", linestyles="dotted", label="perfect scaling")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(count) for count in ranks])
    axes.set_ylim(0, 1.15 * max(rates))
    axes.set_xlabel("GPUs")
    axes.set_ylabel("tokens/s a GPU")
    axes.set_title(f"{title}, simulated")
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path


def plot_rank_costs(curve: Sequence[dict[str, Any]], path: Path) -> Path:
    """Draw each cost of a rank over N on logarithmic axes, relative to the smallest simulated N, with its
    slope in the legend; real ranks are open circles. Returns `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9.0, 5.5))
    simulated = [each for each in curve if each["is_simulated"]]
    processes = [each for each in curve if not each["is_simulated"]]
    keys_of = {name: keys for name, keys, *_ in COSTS}
    markers = "osv^D<>phX*P"
    for number, found in enumerate(growth(curve)):
        keys = keys_of[found.cost]
        points = [(each["ranks"], cost) for each in simulated if (cost := value(each, keys))]
        base, color = points[0][1], f"C{number % 10}"
        label = f"{found.cost}: slope {found.slope:+.2f}"
        xs, ys = zip(*((ranks, cost / base) for ranks, cost in points), strict=True)
        marker = markers[number % len(markers)]
        axes.plot(xs, ys, marker=marker, color=color, label=label)
        real = [
            (each["ranks"], cost / base) for each in processes if (cost := value(each, keys)) and cost > 0
        ]
        if real:
            axes.scatter(*zip(*real, strict=True), marker=marker, facecolors="none", edgecolors=color)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ranks = [each["ranks"] for each in curve]
    axes.set_xticks(ranks, [f"{count:,}" for count in ranks], fontsize=8)
    axes.set_xlabel("ranks (open circles: processes, lines: simulated)")
    axes.set_ylabel(f"relative to {simulated[0]['ranks']:,} simulated ranks")
    axes.set_title(f"Costs of one rank, Llama {curve[0]['shape']}, stage {curve[0]['stage']}")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path
