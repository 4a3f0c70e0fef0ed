"""``zero-ext plan``: what is asked for, planned and reported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from zero_ext.cli import plan_report as report
from zero_ext.cli.console import NEGATIVE, errors_on_stderr, print_json, said, terminal, write_json
from zero_ext.cli.options import AsJson, Experts, Machine, Model, NvmePath, Sequence, Write, output, taking
from zero_ext.config.optimizer_traits import planned_optimizers, traits_of
from zero_ext.plan.models import ModelSpec, model_named
from zero_ext.plan.parse_sizes import bytes_of, count_of, rate_of
from zero_ext.plan.plan_entry import DEFAULT_NVME_PATH, Batch, config_of
from zero_ext.plan.planner import OBJECTIVES, Plan, make_plan
from zero_ext.plan.rank_placement import RankPlacement, best_rank_placement, lengths_of
from zero_ext.plan.simulation.hardware import DEFAULT_MACHINE, Hardware, cluster_of
from zero_ext.plan.simulation.training_setup import DEFAULT_OPTIMIZER

Text = str | None
_MOST_GPUS = 1 << 20


@dataclass(frozen=True)
class PlanOptions:
    """The options of ``zero-ext plan``."""

    model: Model
    gpus: Annotated[int, typer.Option(min=1, max=_MOST_GPUS, help="GPUs in total.")] = 8
    gpus_per_host: Annotated[int | None, typer.Option(min=1, help="The machine's by default.")] = None
    gpu_memory: Annotated[Text, typer.Option(help="Per GPU, such as 80GB. The machine's by default.")] = None
    host_memory: Annotated[Text, typer.Option(help="Per host, such as 512GB. 0 for none.")] = None
    nvme: Annotated[Text, typer.Option(help="Per host, such as 4TB. 0 for none.")] = None
    machine: Machine = DEFAULT_MACHINE
    link_bandwidth: Annotated[
        Text, typer.Option(help="Rate that a GPU receives at in a collective: 25GB/s, 200Gbit/s.")
    ] = None
    batch: Annotated[
        int | None, typer.Option(min=1, help="Samples per step of all GPUs. One per GPU by default.")
    ] = None
    micro_batch: Annotated[
        int | None, typer.Option(min=1, help="Samples per forward of a GPU. The most that fit by default.")
    ] = None
    seq: Sequence = None
    ep: Experts = 1
    optimizer: Annotated[
        str, typer.Option(help="Adafactor, Adam, AdamW, Lamb, Lion, or Muon with AdamW for the rest.")
    ] = DEFAULT_OPTIMIZER
    moments: Annotated[str, typer.Option(help="Dtype of moments: fp32, bf16 or 8bit.")] = "fp32"
    objective: Annotated[str, typer.Option(help="Optimize for speed or memory.")] = "speed"
    tokens: Annotated[
        Text, typer.Option(help="Tokens of the whole training, such as 300B. Shows how long it runs.")
    ] = None
    three_d: Annotated[
        Text,
        typer.Option(
            "--3d",
            help="Lengths of pp, tp and cp, such as pp=4,tp=2: shows how to map ranks onto hosts. "
            "'best' searches for the fastest lengths.",
        ),
    ] = None
    show_all: Annotated[bool, output("Show bytes by kind, traffic and ZeRO++ too.", "--all")] = False
    as_json: AsJson = False
    write: Write = None
    nvme_path: NvmePath = None
    plot: Annotated[Path | None, output("Plot the bytes per tier to .png, .svg or .pdf.")] = None
    html: Annotated[
        Path | None, output("Write one page with charts and a table to sort, which needs no network.")
    ] = None


@taking(PlanOptions)
def plan(options: PlanOptions) -> None:
    """How much memory will my model need, and which ZeRO stage and tiers should I use?

    Recommends a placement and compares it with all others, without a GPU and in about a second. Exit
    status 1 if nothing fits.
    """
    with errors_on_stderr():
        if options.three_d == "best":
            _plan_layouts(options)
            return
        found = plan_of(options)
        ranks = _rank_placement(options, found)
        # Before anything is printed, so that they are there after `| head` too.
        _write_files(options, found)
        _print_plan(options, found, ranks)
        if found.recommendation is None:
            raise typer.Exit(NEGATIVE)


def _write_files(options: PlanOptions, found: Plan) -> None:
    if options.plot is not None:
        from zero_ext.plan.plot import plot_plan

        plot_plan(found, options.plot)
    if options.html is not None:
        from zero_ext.cli.plan_page import write_plan_page

        write_plan_page(found, options.html)
    if options.write is not None and found.recommendation is not None:
        training = found.recommendation.entry.training
        write_json(options.write, said(config_of(found.model, training, _nvme_paths(options))))


def _print_plan(options: PlanOptions, found: Plan, ranks: RankPlacement | None) -> None:
    if options.as_json:
        extra = {} if ranks is None else {"rank_placement": report.rank_placement_as_json(ranks)}
        print_json(report.plan_as_json(found) | extra)
        return
    console = terminal(report.SCREEN_COLUMNS)
    report.print_plan_answer(console, found)
    if options.show_all:
        report.print_plan_tables(terminal(), found)
    else:
        report.print_plan_table(console, found)
    if ranks is not None:
        report.print_rank_placement(console, ranks, found.hardware.ranks_per_node)


def plan_of(options: PlanOptions) -> Plan:
    """Return the plan that the options ask for. Raises ValueError naming the option that cannot be."""
    if options.objective not in OBJECTIVES:
        raise ValueError(
            f"--objective: expected one of {', '.join(OBJECTIVES)}, got {options.objective!r}. Choose one "
            "of those."
        )
    tokens = None if options.tokens is None else count_of(options.tokens)
    if options.tokens is not None and tokens is None:
        raise ValueError(f"--tokens: expected a number like 300B, got {options.tokens!r}. Write it that way.")
    optimizer = traits_of(options.optimizer)
    if optimizer is None or optimizer.name not in planned_optimizers():
        raise ValueError(
            f"--optimizer: expected one of {', '.join(planned_optimizers())}, got {options.optimizer!r}. "
            "Choose one of those."
        )
    if options.gpus % options.ep:
        raise ValueError(
            f"--ep: expected a divisor of the {options.gpus} GPUs, got {options.ep}. Choose a divisor."
        )
    model = model_named(options.model, options.seq).with_experts_over(options.ep)
    _check_dense(options, model)
    return make_plan(
        model,
        _hardware(options),
        options.gpus,
        Batch(_samples(options), options.micro_batch, options.gpus),
        "memory" if options.objective == "memory" else "speed",
        moments_dtype=options.moments,
        optimizer_type=optimizer.name,
        tokens=tokens,
    )


def _plan_layouts(options: PlanOptions) -> None:
    """Search for the fastest layouts, print them, and write the configuration of the first."""
    from zero_ext.plan.layout import LayoutRequest, best_layouts
    from zero_ext.plan.layout.layout_search import why_no_layout

    unused = {"--tokens": options.tokens, "--plot": options.plot, "--html": options.html}
    unused["--optimizer"] = None if options.optimizer == DEFAULT_OPTIMIZER else options.optimizer
    unused["--ep"] = None if options.ep == 1 else str(options.ep)
    unused["--objective"] = None if options.objective == "speed" else options.objective
    for option, value in unused.items():
        if value is not None:
            raise ValueError(f"{option}: --3d best does not use it, got {str(value)!r}. Leave it out.")
    model = model_named(options.model, options.seq)
    _check_dense(options, model)
    wanted = LayoutRequest(
        model,
        _hardware(options),
        options.gpus,
        _samples(options),
        options.micro_batch,
        options.moments,
    )
    found = best_layouts(wanted)
    why = None if found else why_no_layout(wanted)
    if options.as_json:
        print_json(report.layouts_as_json(wanted, found) | {"why_nothing_fits": why})
    elif found:
        report.print_layouts(terminal(), wanted, found)
    else:
        terminal().print(f"[bold red]Nothing fits.[/] {escape(str(why))}", soft_wrap=True)
    if not found:
        raise typer.Exit(NEGATIVE)
    if options.write is not None:
        write_json(options.write, report.layout_config(wanted, found[0].layout, _nvme_paths(options)))


def _check_dense(options: PlanOptions, model: ModelSpec) -> None:
    """Refuse --3d with experts, which pp, tp and cp are not planned with."""
    if options.three_d is not None and model.shape.mixture is not None:
        raise ValueError(
            f"--3d: expected a model without experts, got {model.name}. Leave --3d out, and set --ep."
        )


def _samples(options: PlanOptions) -> int:
    return options.batch or options.gpus * (options.micro_batch or 1)


def _nvme_paths(options: PlanOptions) -> tuple[str, ...]:
    return tuple(options.nvme_path or (DEFAULT_NVME_PATH,))


def _rank_placement(options: PlanOptions, found: Plan) -> RankPlacement | None:
    if options.three_d is None:
        return None
    stage = 1 if found.recommendation is None else found.recommendation.entry.training.stage
    sizes = lengths_of(options.three_d, options.gpus)
    return best_rank_placement(
        found.model, found.hardware, sizes, found.batch.samples, options.micro_batch or 1, stage
    )


def _hardware(options: PlanOptions) -> Hardware:
    sizes = {
        name: None if text is None else bytes_of(text, f"--{name.replace('_', '-')}")
        for name in ("gpu_memory", "host_memory", "nvme")
        for text in (getattr(options, name),)
    }
    if sizes["gpu_memory"] == 0:
        raise ValueError(
            f"--gpu-memory: expected more than 0, got {options.gpu_memory!r}. Write it like 80GB."
        )
    rate = options.link_bandwidth
    return cluster_of(
        options.machine,
        gpus_per_host=options.gpus_per_host,
        link_bandwidth=None if rate is None else rate_of(rate, "--link-bandwidth"),
        **sizes,
    )
