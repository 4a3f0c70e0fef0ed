"""The answer of a plan on one screen: the recommendation, its reasons, and a table of all placements."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zero_ext.cli.console import counted
from zero_ext.plan.nearest_fit import why_nothing_fits
from zero_ext.plan.parse_sizes import COUNTS, short_bytes, short_number
from zero_ext.plan.plan_entry import TIERS, PlanEntry
from zero_ext.plan.planner import Plan

SCREEN_COLUMNS = 100
TIER_NAMES = {"device": "GPU", "host": "host", "nvme": "NVMe"}
_DAY, _HOUR = 86400, 3600


def print_plan_answer(console: Console, plan: Plan) -> None:
    """Print the recommendation and its reasons, or why nothing fits, and the assumptions behind it."""
    if plan.recommendation is None:
        console.print(f"[bold red]Nothing fits.[/] {escape(why_nothing_fits(plan))}")
    else:
        console.print(f"[bold green]{escape(headline(plan))}[/]")
        console.print(speed(plan, plan.recommendation.entry))
        reasons = Table.grid(padding=(0, 1, 0, 0))
        for reason in plan.recommendation.reasons:
            reasons.add_row(" -", escape(reason))
        console.print(reasons)
    console.print()
    for line in assumptions(plan):
        console.print(escape(line))


def headline(plan: Plan) -> str:
    """Return the answer of a plan in one line."""
    where = f"{plan.model.name} on {counted(plan.gpus, 'GPU')} of {plan.hardware.name}"
    if plan.recommendation is None:
        return f"Nothing fits: {where}"
    return f"Recommended: {plan.recommendation.entry.candidate} for {where}"


def assumptions(plan: Plan) -> list[str]:
    """Return the model, the batch and the machine that a plan is for, as lines."""
    model, machine = plan.model, plan.hardware
    nvme = short_bytes(machine.nvme_bytes) if machine.nvme_bytes > 1 else "no"
    return [
        f"{model.name}: {model.parameters:,} parameters ({model.source}), "
        f"{model.shape.sequence:,} tokens per sample, {counted(plan.batch.samples, 'sample')} per step.",
        f"{machine.name}: {short_bytes(machine.device_bytes)} per GPU, "
        f"{short_bytes(machine.host_bytes)} of memory and {nvme} NVMe per host, "
        f"{counted(plan.hosts, 'host')}.",
    ]


def print_plan_table(console: Console, plan: Plan) -> None:
    """Print one line per placement, the best first, with the bytes of the fullest GPU and host."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("placement", no_wrap=True)
    for tier in TIERS:
        table.add_column(TIER_NAMES[tier], justify="right", no_wrap=True)
    table.add_column("fits", no_wrap=True)
    table.add_column("s/step", justify="right", no_wrap=True)
    table.add_column("bound by", no_wrap=True)
    for row in best_first(plan):
        table.add_row(
            escape(str(row.candidate)),
            *(short_bytes(nbytes) if (nbytes := row.needs.total(tier)) else "-" for tier in TIERS),
            "yes" if row.fits else f"no: {', '.join(TIER_NAMES[short.tier] for short in row.shortfalls)}",
            three_digits(row.step.seconds),
            row.step.busiest,
            style=row_style(plan, row),
        )
    console.print(table)
    console.print("[dim]More: --all (bytes by kind, traffic), --json, --write config.json, --plot plan.png")


def best_first(plan: Plan) -> list[PlanEntry]:
    """Return the recommended placement, the others that fit by speed, and the rest by what they lack."""
    chosen = None if plan.recommendation is None else plan.recommendation.entry
    return sorted(
        plan.entries, key=lambda row: (row is not chosen, not row.fits, row.excess, row.step.seconds)
    )


def row_style(plan: Plan, row: PlanEntry) -> str:
    """Return the style of a placement's row in a table."""
    if plan.recommends(row):
        return "bold green"
    return "" if row.fits else "dim"


def duration(seconds: float) -> str:
    """Return seconds as days or hours where they are many."""
    if seconds >= 2 * _DAY:
        return f"{seconds / _DAY:,.1f} days"
    return f"{seconds / _HOUR:,.1f} hours" if seconds >= _HOUR else f"{seconds:,.0f} s"


def speed(plan: Plan, row: PlanEntry) -> str:
    """Return the speed and the GPU memory of a placement, and the time of the whole training if known."""
    text = (
        f"{three_digits(row.step.seconds)} s/step, {row.tokens_per_second:,.0f} tokens/s, "
        f"bound by {row.step.busiest}, {short_bytes(row.needs.total('device'))} per GPU"
    )
    total = plan.total_seconds(row)
    if plan.tokens is None or total is None:
        return text
    return f"{text}, {duration(total)} for {short_number(plan.tokens, tuple(COUNTS))} tokens"


def three_digits(seconds: float) -> str:
    """Return a number of seconds with three digits."""
    return f"{seconds:,.0f}" if seconds >= 999.5 else f"{seconds:#.3g}".rstrip(".")
