"""Every figure of a plan as two wide tables: bytes by kind, and the traffic and time of a step."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zero_ext.cli.planning.plan_screen import TIER_NAMES, duration, row_style
from zero_ext.plan.parse_sizes import short_bytes
from zero_ext.plan.plan_entry import KINDS, TIERS, PlanEntry
from zero_ext.plan.planner import Plan


def print_plan_tables(console: Console, plan: Plan) -> None:
    """Print all placements in the order of stages and tiers, and what compression would save."""
    console.print(_bytes_table(plan))
    console.print(_cost_table(plan))
    if plan.recommendation is not None:
        _print_crossing(console, plan, plan.recommendation.entry)


def _print_crossing(console: Console, plan: Plan, recommended: PlanEntry) -> None:
    full = plan.crossing(recommended, compressed=False)
    if not full:
        return
    said = [f"Between hosts a GPU sends {short_bytes(full)} per step of the recommended placement"]
    less = {"all of 'communication' (ZeRO++)": recommended} if not recommended.allows_one_bit else {}
    for row in plan.entries:
        if plan.fits_one_bit(row):
            less[f"1-bit Adam in stage {row.training.stage}, after its warm-up"] = row
    for label, row in less.items():
        sent = plan.crossing(row, compressed=True)
        if sent < full:
            said.append(f"{short_bytes(sent)} with {label}")
    console.print(", ".join(said) + ".", soft_wrap=True)


def _bytes_table(plan: Plan) -> Table:
    table = Table(title="bytes", title_justify="left")
    table.add_column("placement", no_wrap=True)
    table.add_column("where", no_wrap=True)
    for name in (*KINDS, "all", "of"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in plan.entries:
        used = [tier for tier in TIERS if row.needs.total(tier)]
        for tier in used:
            total, capacity = row.needs.total(tier), getattr(plan.hardware, f"{tier}_bytes")
            cells = (short_bytes(nbytes) if nbytes else "" for nbytes in row.by_kind(tier).values())
            table.add_row(
                escape(str(row.candidate)) if tier == used[0] else "",
                TIER_NAMES[tier],
                *cells,
                ("[red]" if total > capacity else "") + short_bytes(total),
                short_bytes(capacity) if capacity > 1 else "none",
                style=row_style(plan, row),
                end_section=tier == used[-1] and row.candidate.stage != _next_stage(plan, row),
            )
    return table


def _next_stage(plan: Plan, row: PlanEntry) -> int | None:
    behind = plan.entries[plan.entries.index(row) + 1 :]
    return behind[0].candidate.stage if behind else None


def _cost_table(plan: Plan) -> Table:
    columns = ["placement", "fits", "activations", "micro-batch", "largest", "sent", "PCIe in", "PCIe out"]
    columns += ["NVMe read", "written", "s/step", "bound by", "tokens/s"]
    table = Table(title="a step of one GPU", title_justify="left")
    for number, name in enumerate([*columns, *([] if plan.tokens is None else ["in all"])]):
        table.add_column(name, no_wrap=number == 0, justify="right" if number > 2 else "left")
    for row in plan.entries:
        training, step = row.training, row.step
        moved = (step.sent, step.to_device, step.to_host, step.read, step.written)
        total = plan.total_seconds(row)
        table.add_row(
            escape(str(row.candidate)),
            "yes" if row.fits else f"[red]{_short(row)}",
            training.activations.replace("_", ", "),
            f"{training.micro_batch} x {training.accumulation_steps}",
            str(row.largest_micro_batch or "none"),
            *(short_bytes(nbytes) if nbytes else "" for nbytes in moved),
            f"{step.seconds:.3g}",
            step.busiest,
            f"{row.tokens_per_second:,.0f}",
            *([] if total is None else [duration(total)]),
            style=row_style(plan, row),
        )
    return table


def _short(row: PlanEntry) -> str:
    """Return how many times what there is of a tier would be needed, tier by tier."""
    return ", ".join(
        f"no {TIER_NAMES[short.tier]}"
        if short.available <= 1
        else f"{TIER_NAMES[short.tier]} x{short.times:.3g}"
        for short in row.shortfalls
    )
