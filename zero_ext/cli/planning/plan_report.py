"""A plan as tables, as JSON and as a ready configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zero_ext.config.parse_sizes import short_bytes
from zero_ext.plan.nearest_fit import why_nothing_fits
from zero_ext.plan.plan_entry import KINDS, TIERS, PlanEntry
from zero_ext.plan.planner import Plan
from zero_ext.plan.write_config import DEFAULT_NVME_PATH, config_of

_WHERE = {"device": "GPU", "host": "host", "nvme": "NVMe"}
_DAY, _HOUR = 86400, 3600


def print_plan(console: Console, plan: Plan) -> None:
    """Bytes of every placement, what it costs, and the recommendation."""
    model, machine = plan.model, plan.hardware
    console.print(
        f"[bold]{escape(model.name)}[/]: {model.parameters:,} parameters ({escape(model.source)}), "
        f"{model.shape.sequence} tokens a sample, {plan.batch.samples} samples a step\n"
        f"{plan.gpus} GPUs of {escape(machine.name)}, {plan.hosts} host{'s' if plan.hosts > 1 else ''}: "
        f"{short_bytes(machine.device_bytes)} a GPU, {short_bytes(machine.host_bytes)} and "
        f"{short_bytes(machine.nvme_bytes) if machine.nvme_bytes > 1 else 'no'} NVMe a host",
        soft_wrap=True,
    )
    console.print(_bytes_table(plan))
    console.print(_cost_table(plan))
    if plan.recommendation is not None:
        console.print(f"[green]take {escape(str(plan.recommendation.entry.candidate))}[/]: ", end="")
        console.print(escape("; ".join(plan.recommendation.reasons)) + ".", soft_wrap=True)
        _print_crossing(console, plan, plan.recommendation.entry)


def _print_crossing(console: Console, plan: Plan, recommended: PlanEntry) -> None:
    full = plan.crossing(recommended, compressed=False)
    if not full:
        return
    said = [f"Between hosts a GPU sends {short_bytes(full)} in a step of that"]
    less = {"all of 'communication' (ZeRO++)": recommended} if not recommended.allows_one_bit else {}
    for row in plan.entries:
        if plan.fits_one_bit(row):
            less[f"1-bit Adam in stage {row.training.stage}, after its warm-up"] = row
    for label, row in less.items():
        sent = plan.crossing(row, compressed=True)
        if sent < full:
            said.append(f"{short_bytes(sent)} with {label}")
    console.print("; ".join(said) + ".", soft_wrap=True)


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """Everything that the tables show, in bytes and seconds."""
    return {
        "model": {"name": plan.model.name, "parameters": plan.model.parameters, "source": plan.model.source},
        "gpus": plan.gpus,
        "hosts": plan.hosts,
        "machine": plan.hardware.to_mapping(),
        "samples_per_step": plan.batch.samples,
        "sequence": plan.model.shape.sequence,
        "objective": plan.objective,
        "placements": [_row_as_json(plan, row) for row in plan.entries],
        "recommendation": None
        if plan.recommendation is None
        else {
            "placement": str(plan.recommendation.entry.candidate),
            "reasons": list(plan.recommendation.reasons),
            "config": config_of(plan.model, plan.recommendation.entry.training).model_dump(
                mode="json", exclude_unset=True
            ),
        },
        "why_nothing_fits": None if plan.recommendation is not None else why_nothing_fits(plan),
    }


def write_config(plan: Plan, path: Path, nvme_paths: tuple[str, ...]) -> None:
    """The recommended placement as a configuration file. ValueError if nothing fits."""
    if plan.recommendation is None:
        raise ValueError(why_nothing_fits(plan))
    config = config_of(plan.model, plan.recommendation.entry.training, nvme_paths or (DEFAULT_NVME_PATH,))
    said = config.model_dump(mode="json", exclude_unset=True)
    path.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")


def _row_as_json(plan: Plan, row: PlanEntry) -> dict[str, Any]:
    training, step = row.training, row.step
    return {
        "stage": training.stage,
        "params": training.params,
        "grads": training.grads,
        "optimizer": training.optimizer,
        "activations": training.activations,
        "micro_batch": training.micro_batch,
        "accumulation_steps": training.accumulation_steps,
        "largest_micro_batch": row.largest_micro_batch,
        "bytes": {tier: row.by_kind(tier) for tier in TIERS},
        "fits": row.fits,
        "lacks": {short.tier: short.needed - short.available for short in row.shortfalls},
        "sent_bytes": step.sent,
        "inter_node_bytes": {
            "full": plan.crossing(row, compressed=False),
            "compressed": plan.crossing(row, compressed=True),
        },
        "pcie_bytes": {"to_device": step.to_device, "to_host": step.to_host},
        "nvme_bytes": {"read": step.read, "written": step.written},
        "step_seconds": step.seconds,
        "busiest": step.busiest,
        "tokens_per_second": row.tokens_per_second,
        "total_seconds": plan.total_seconds(row),
    }


def _style(plan: Plan, row: PlanEntry) -> str:
    if plan.recommendation is not None and row is plan.recommendation.entry:
        return "bold green"
    return "" if row.fits else "dim"


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
                _WHERE[tier],
                *cells,
                ("[red]" if total > capacity else "") + short_bytes(total),
                short_bytes(capacity) if capacity > 1 else "none",
                style=_style(plan, row),
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
            *([] if total is None else [_duration(total)]),
            style=_style(plan, row),
        )
    return table


def _short(row: PlanEntry) -> str:
    """How many times what there is of a tier would be needed, tier by tier."""
    return ", ".join(
        f"no {_WHERE[short.tier]}" if short.available <= 1 else f"{_WHERE[short.tier]} x{short.times:.3g}"
        for short in row.shortfalls
    )


def _duration(seconds: float) -> str:
    if seconds >= 2 * _DAY:
        return f"{seconds / _DAY:,.1f} days"
    return f"{seconds / _HOUR:,.1f} hours" if seconds >= _HOUR else f"{seconds:,.0f} s"
