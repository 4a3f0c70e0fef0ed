"""A plan on one screen, as wide tables and as JSON, and the layouts of ``--3d``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zero_ext.cli.console import counted, said
from zero_ext.config.tiers import CAPACITIES, TIERS
from zero_ext.plan.parse_sizes import COUNTS, short_bytes, short_number
from zero_ext.plan.plan_entry import DEFAULT_NVME_PATH, KINDS, PlanEntry, config_of
from zero_ext.plan.planner import Plan, why_nothing_fits
from zero_ext.plan.rank_placement import RankPlacement
from zero_ext.plan.simulation.run_memory import Shortfall
from zero_ext.plan.simulation.training_setup import DEFAULT_OPTIMIZER, Training

if TYPE_CHECKING:
    from zero_ext.plan.layout import FoundLayout, LayoutRequest, ParallelLayout

SCREEN_COLUMNS = 100
_DAY, _HOUR = 86400, 3600
_AXES = {
    "pp": "pipeline stages",
    "dp": "replicas, sharded by ZeRO",
    "cp": "slices of a sequence",
    "tp": "slices of tensors",
}


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
    rules = plan.entries[0].training.rules
    ends = (" for hidden matrices", " for the rest") if len(rules) > 1 else (" for all parameters",)
    named = ", ".join(f"{rule}{end}" for rule, end in zip(rules, ends, strict=True))
    optimizer = [] if rules == (DEFAULT_OPTIMIZER,) else [f"{named}."]
    active = "" if model.shape.mixture is None else f", {model.active_parameters:,} of them per token"
    return [
        f"{model.name}: {model.parameters:,} parameters{active} ({model.source}), "
        f"{model.shape.sequence:,} tokens per sample, {counted(plan.batch.samples, 'sample')} per step.",
        f"{machine.name}: {short_bytes(machine.device_bytes)} per GPU, "
        f"{short_bytes(machine.host_bytes)} of memory and {nvme} NVMe per host, "
        f"{counted(plan.hosts, 'host')}.",
        *optimizer,
    ]


def print_plan_table(console: Console, plan: Plan) -> None:
    """Print one line per placement, the best first, with the bytes of the fullest GPU and host."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    numbers = [*(TIERS[tier].short for tier in CAPACITIES), "s/step"]
    for name in ("placement", *numbers[:3], "fits", "s/step", "bound by"):
        table.add_column(name, justify="right" if name in numbers else "left", no_wrap=True)
    for row in best_first(plan):
        table.add_row(
            escape(str(row.candidate)),
            *(_bytes(row.needs.total(tier), "-") for tier in CAPACITIES),
            fits_in_words(row),
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


def fits_in_words(row: PlanEntry) -> str:
    """Return "yes", or the tiers that are too small."""
    return "yes" if row.fits else f"no: {', '.join(TIERS[short.tier].short for short in row.shortfalls)}"


def _bytes(nbytes: int, none: str = "") -> str:
    return short_bytes(nbytes) if nbytes else none


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
    for name in ("placement", "where", *KINDS, "all", "of"):
        table.add_column(name, justify="left" if name in ("placement", "where") else "right", no_wrap=True)
    behind = [row.candidate.stage for row in plan.entries[1:]]
    for row, stage_behind in zip_longest(plan.entries, behind):
        used = [tier for tier in CAPACITIES if row.needs.total(tier)]
        for tier in used:
            total, capacity = row.needs.total(tier), getattr(plan.hardware, f"{tier}_bytes")
            table.add_row(
                escape(str(row.candidate)) if tier == used[0] else "",
                TIERS[tier].short,
                *map(_bytes, row.by_kind(tier).values()),
                ("[red]" if total > capacity else "") + short_bytes(total),
                short_bytes(capacity) if capacity > 1 else "none",
                style=row_style(plan, row),
                end_section=tier == used[-1] and row.candidate.stage != stage_behind,
            )
    return table


def _cost_table(plan: Plan) -> Table:
    columns = ["placement", "fits", "activations", "micro-batch", "largest", "sent", "PCIe in", "PCIe out"]
    columns += ["NVMe read", "written", "s/step", "bound by", "tokens/s"]
    table = Table(title="a step of one GPU", title_justify="left")
    for number, name in enumerate([*columns, *([] if plan.tokens is None else ["in all"])]):
        table.add_column(name, no_wrap=number == 0, justify="right" if number > 2 else "left")
    for row in plan.entries:
        training, step = row.training, row.step
        total = plan.total_seconds(row)
        table.add_row(
            escape(str(row.candidate)),
            "yes" if row.fits else f"[red]{_short(row)}",
            training.activations.replace("_", ", "),
            f"{training.micro_batch} x {training.accumulation_steps}",
            str(row.largest_micro_batch or "none"),
            *map(_bytes, (step.sent, step.to_device, step.to_host, step.read, step.written)),
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
        f"no {TIERS[short.tier].short}"
        if short.available <= 1
        else f"{TIERS[short.tier].short} x{short.times:.3g}"
        for short in row.shortfalls
    )


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """Return everything that the tables show, in bytes and seconds."""
    return {
        "model": {
            "name": plan.model.name,
            "parameters": plan.model.parameters,
            "active_parameters": plan.model.active_parameters,
            "source": plan.model.source,
        },
        "ep": plan.model.ep_size,
        "gpus": plan.gpus,
        "hosts": plan.hosts,
        "machine": plan.hardware.to_mapping(),
        "samples_per_step": plan.batch.samples,
        "sequence": plan.model.shape.sequence,
        "objective": plan.objective,
        "optimizer_type": plan.entries[0].training.optimizer_type,
        "placements": [_row_as_json(plan, row) for row in plan.entries],
        "recommendation": None
        if plan.recommendation is None
        else {
            "placement": str(plan.recommendation.entry.candidate),
            "reasons": list(plan.recommendation.reasons),
            "config": said(config_of(plan.model, plan.recommendation.entry.training)),
        },
        "why_nothing_fits": None if plan.recommendation is not None else why_nothing_fits(plan),
    }


def training_as_json(training: Training) -> dict[str, Any]:
    """Return the placement and batch of a simulated step."""
    return {
        "stage": training.stage,
        **training.tiers,
        "activations": training.activations,
        "micro_batch": training.micro_batch,
        "accumulation_steps": training.accumulation_steps,
    }


def lacks_as_json(shortfalls: Sequence[Shortfall]) -> dict[str, Any]:
    """Return whether all fits, and bytes that are missing by tier."""
    return {
        "fits": not shortfalls,
        "lacks": {short.tier: short.needed - short.available for short in shortfalls},
    }


def _row_as_json(plan: Plan, row: PlanEntry) -> dict[str, Any]:
    step = row.step
    return {
        **training_as_json(row.training),
        "largest_micro_batch": row.largest_micro_batch,
        "bytes": {tier: row.by_kind(tier) for tier in CAPACITIES},
        **lacks_as_json(row.shortfalls),
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


def print_layouts(console: Console, wanted: LayoutRequest, found: Sequence[FoundLayout]) -> None:
    """Print the layouts with their reasons, and what to write for the first."""
    from zero_ext.plan.layout.layout_search import reasons_of  # late: it needs torch

    table = Table(title=f"{wanted.model.name} on {wanted.gpus} GPUs of {wanted.hardware.name}")
    for name in ("pp", "dp", "tp", "ZeRO", "micro-batch", "memory", "s/step", "tokens/s"):
        table.add_column(name, justify="left" if name == "ZeRO" else "right", no_wrap=True)
    for one in found:
        layout, training = one.layout, one.layout.training
        table.add_row(
            *map(str, layout.sizes.values()),
            str(layout.placement),
            f"{training.micro_batch} x {layout.micro_batches}",
            short_bytes(one.fullest.needs.total("device")),
            f"{one.time.seconds:.3g}",
            f"{_tokens_per_second(wanted, one):,.0f}",
        )
    console.print(table)
    for rank, one in enumerate(found, 1):
        console.print(f"{rank}. {escape(reasons_of(one, wanted.hardware))}.", soft_wrap=True)
    best = found[0].layout
    if best.tp > wanted.hardware.ranks_per_node:
        console.print(
            "[yellow]Tensors are shared between hosts: nothing fits that shares them inside one.[/]"
        )
    console.print(f"[green]{escape(_calls(best))}[/]", soft_wrap=True)
    console.print(json.dumps(layout_config(wanted, best)), markup=False, soft_wrap=True)


def layouts_as_json(wanted: LayoutRequest, found: Sequence[FoundLayout]) -> dict[str, Any]:
    """Return everything that the table shows, in bytes and seconds."""
    from zero_ext.plan.layout.layout_search import reasons_of  # late: it needs torch

    return {
        "model": {"name": wanted.model.name, "parameters": wanted.model.parameters},
        "gpus": wanted.gpus,
        "machine": wanted.hardware.to_mapping(),
        "samples_per_step": wanted.samples,
        "layouts": [
            {
                **one.layout.sizes,
                "placement": str(one.layout.placement),
                "activations": one.layout.training.activations,
                "micro_batch": one.layout.training.micro_batch,
                "micro_batches": one.layout.micro_batches,
                "bytes": {tier: getattr(one.fullest.needs, tier) for tier in CAPACITIES},
                "fullest_stage": one.fullest.stage,
                "seconds": one.time.components,
                "step_seconds": one.time.seconds,
                "tokens_per_second": _tokens_per_second(wanted, one),
                "reasons": reasons_of(one, wanted.hardware),
                "calls": _calls(one.layout),
                "config": layout_config(wanted, one.layout),
            }
            for one in found
        ],
    }


def _tokens_per_second(wanted: LayoutRequest, found: FoundLayout) -> float:
    return wanted.samples * wanted.model.shape.sequence / found.time.seconds


def layout_config(
    wanted: LayoutRequest, layout: ParallelLayout, nvme_paths: tuple[str, ...] = (DEFAULT_NVME_PATH,)
) -> dict[str, Any]:
    """Return the configuration of a layout."""
    return said(config_of(wanted.model, layout.training, nvme_paths, tiles=layout.tp == 1))


def _calls(layout: ParallelLayout) -> str:
    """Return what a script calls besides ``prepare``."""
    lengths = ", ".join(f"{axis}={length}" for axis, length in layout.sizes.items())
    calls = f"mesh = make_mesh({lengths})"
    if layout.tp > 1:
        calls += "; apply_tensor_parallel(model, mesh)"
    if layout.pp > 1:
        grad_reduction = ', grad_reduction="per_micro_batch"' if layout.reduces_each else ""
        calls += f"; Pipeline(module, optimizer, micro_batches={layout.micro_batches}{grad_reduction})"
    return calls


def print_rank_placement(console: Console, placement: RankPlacement, ranks_per_host: int) -> None:
    """Print the time of each axis' traffic, in the best mapping and in a fixed order of the axes."""
    table = Table(title="Placement of the ranks")
    for heading in ("axis", "of", "ranks", "ms per step", f"as {placement.naive}, ms"):
        table.add_column(heading, justify="left" if heading in ("axis", "of") else "right")
    for axis, length in placement.mapping.sizes.items():
        seconds, counted = placement.seconds[axis], placement.naive_seconds[axis]
        table.add_row(axis, _AXES[axis], str(length), f"{1e3 * seconds:,.1f}", f"{1e3 * counted:,.1f}")
    console.print(table)
    console.print(
        f"[green]Best: count ranks as {placement.mapping}[/], the last axis fastest, {ranks_per_host} to a "
        f"host. Communication is {placement.gain:.2f} times faster. "
        "Use make_mesh(..., mapping=best_mapping(...)[0])."
    )


def rank_placement_as_json(placement: RankPlacement) -> dict[str, Any]:
    """Return the same in seconds."""
    return {
        "mapping": [list(digit) for digit in placement.mapping.digits],
        "seconds": placement.seconds,
        "naive_mapping": [list(digit) for digit in placement.naive.digits],
        "naive_seconds": placement.naive_seconds,
    }
