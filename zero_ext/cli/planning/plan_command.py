"""``zero-ext plan``: what is asked for, planned and reported."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from zero_ext.cli.console import errors_on_stderr, terminal
from zero_ext.cli.dataclass_options import taking
from zero_ext.cli.planning.rank_mapping_report import print_rank_placement, rank_placement_as_json
from zero_ext.config.parse_sizes import bytes_of, count_of, rate_of
from zero_ext.plan.cluster import DEFAULT_MACHINE, ClusterOptions
from zero_ext.plan.models import ModelSpec, model_named
from zero_ext.plan.plan_entry import Batch
from zero_ext.plan.planner import Plan, make_plan
from zero_ext.plan.rank_placement import RankPlacement, best_rank_placement, lengths_of
from zero_ext.plan.recommendation import OBJECTIVES

Text = str | None
_MOST_GPUS = 1 << 20


@dataclass(frozen=True)
class PlanOptions:
    """The options of ``zero-ext plan``."""

    model: Annotated[
        str, typer.Argument(help="A preset (llama-7b, 13b, 1t), 7.5B, a config.json, or a folder with one.")
    ]
    gpus: Annotated[int, typer.Option(min=1, max=_MOST_GPUS, help="GPUs in all.")] = 8
    gpu_memory: Annotated[Text, typer.Option(help="Of a GPU, like 80GB; else the machine's.")] = None
    host_memory: Annotated[Text, typer.Option(help="Of a host, like 512GB; 0 for none.")] = None
    nvme: Annotated[Text, typer.Option(help="Of a host, like 4TB; 0 for none.")] = None
    gpus_per_host: Annotated[int | None, typer.Option(min=1, help="Else the machine's.")] = None
    machine: Annotated[
        str, typer.Option(help="Rates and sizes: a name like dgx2-v100, or a file of `env --measure`.")
    ] = DEFAULT_MACHINE
    link_bandwidth: Annotated[
        Text, typer.Option(help="What a GPU receives in a collective, like 25GB/s, 200Gbit/s.")
    ] = None
    batch: Annotated[int | None, typer.Option(min=1, help="Samples of a step; one a GPU by default.")] = None
    micro_batch: Annotated[
        int | None, typer.Option(min=1, help="Samples of a GPU's forward; else the most that fit.")
    ] = None
    seq: Annotated[int | None, typer.Option(min=1, max=1 << 24, help="Tokens of a sample.")] = None
    moments: Annotated[str, typer.Option(help="Of Adam: fp32, bf16 or 8bit.")] = "fp32"
    objective: Annotated[str, typer.Option(help="memory or speed.")] = "speed"
    tokens: Annotated[Text, typer.Option(help="Of the whole training, like 300B: shows its time.")] = None
    write: Annotated[Path | None, typer.Option(help="JSON file for the recommended configuration.")] = None
    nvme_path: Annotated[
        list[str] | None, typer.Option(help="Folder on NVMe for --write; may be repeated.")
    ] = None
    plot: Annotated[Path | None, typer.Option(help="Plot of the bytes per tier against the capacity.")] = None
    three_d: Annotated[
        Text,
        typer.Option(
            "--3d",
            help="Lengths of pp, tp and cp, like pp=4,tp=2: shows where the ranks go. best: searches.",
        ),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False


@taking(PlanOptions)
def plan(options: PlanOptions) -> None:
    """Say what training a model takes in every stage and tier, what fits, and what to choose.

    Exit status 1 if nothing fits.
    """
    from zero_ext.cli.planning import plan_report as report

    with errors_on_stderr():
        if options.three_d == "best":
            _plan_layouts(options)
            return
        found = plan_of(options)
        placement = _rank_placement(options, found)
        if options.as_json:
            extra = {} if placement is None else {"rank_placement": rank_placement_as_json(placement)}
            print(json.dumps(report.plan_as_json(found) | extra, indent=2))
        else:
            report.print_plan(terminal(), found)
            if placement is not None:
                print_rank_placement(terminal(), placement, found.hardware.ranks_per_node)
        if options.plot is not None:
            from zero_ext.plan.plot import plot_plan

            plot_plan(found, options.plot)
        if found.recommendation is None:
            raise ValueError(report.why_nothing_fits(found))
        if options.write is not None:
            report.write_config(found, options.write, tuple(options.nvme_path or ()))


def plan_of(options: PlanOptions) -> Plan:
    """The plan that the options ask for. Raises ValueError naming the option that cannot be."""
    if options.objective not in OBJECTIVES:
        raise ValueError(f"--objective is {options.objective!r}, one of {', '.join(OBJECTIVES)} wanted")
    tokens = None if options.tokens is None else count_of(options.tokens)
    if options.tokens is not None and tokens is None:
        raise ValueError(f"--tokens is {options.tokens!r}; a number like 300B is wanted")
    return make_plan(
        _model(options),
        _cluster(options).hardware(),
        options.gpus,
        Batch(_samples(options), options.micro_batch, options.gpus),
        "memory" if options.objective == "memory" else "speed",
        moments_dtype=options.moments,
        tokens=tokens,
    )


def _plan_layouts(options: PlanOptions) -> None:
    """Searches for the fastest layouts, prints them, and writes the first one's configuration."""
    from zero_ext.cli.planning import parallel_layout_report as report
    from zero_ext.plan.layout import LayoutRequest, best_layouts
    from zero_ext.plan.layout.explain import why_no_layout

    unused = {"--tokens": options.tokens, "--plot": options.plot}
    unused["--objective"] = None if options.objective == "speed" else options.objective
    for option, value in unused.items():
        if value is not None:
            raise ValueError(f"{option} is {str(value)!r}, which --3d best does not use; leave it out")
    hardware = _cluster(options).hardware()
    wanted = LayoutRequest(
        _model(options), hardware, options.gpus, _samples(options), options.micro_batch, options.moments
    )
    found = best_layouts(wanted)
    if not found:
        raise ValueError(why_no_layout(wanted))
    if options.as_json:
        print(json.dumps(report.layouts_as_json(wanted, found), indent=2))
    else:
        report.print_layouts(terminal(), wanted, found)
    if options.write is not None:
        report.write_layout(wanted, found[0], options.write, tuple(options.nvme_path or ()))


def _model(options: PlanOptions) -> ModelSpec:
    model = model_named(options.model)
    return model if options.seq is None else model.with_sequence(options.seq)


def _samples(options: PlanOptions) -> int:
    return options.batch or options.gpus * (options.micro_batch or 1)


def _rank_placement(options: PlanOptions, found: Plan) -> RankPlacement | None:
    if options.three_d is None:
        return None
    stage = 1 if found.recommendation is None else found.recommendation.entry.training.stage
    sizes = lengths_of(options.three_d, options.gpus)
    return best_rank_placement(
        found.model, found.hardware, sizes, found.batch.samples, options.micro_batch or 1, stage
    )


def _cluster(options: PlanOptions) -> ClusterOptions:
    def size(text: Text, option: str) -> int | None:
        return None if text is None else bytes_of(text, option)

    bandwidth = options.link_bandwidth
    gpu_memory = size(options.gpu_memory, "--gpu-memory")
    if gpu_memory == 0:
        raise ValueError(f"--gpu-memory is {options.gpu_memory!r}; a GPU has some, like 80GB")
    return ClusterOptions(
        options.machine,
        options.gpus_per_host,
        gpu_memory,
        size(options.host_memory, "--host-memory"),
        size(options.nvme, "--nvme"),
        None if bandwidth is None else rate_of(bandwidth, "--link-bandwidth"),
    )
