"""The commands of ``zero-ext``: arguments in, text out; the work is done elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperCommand

from zero_ext.cli.console import cleaned_up_when_ended, errors_on_stderr, printable, terminal
from zero_ext.cli.planning.plan_command import plan
from zero_ext.cli.planning.tune_command import tune
from zero_ext.cli.plot_attention import attention
from zero_ext.config.parse_sizes import bytes_of

if TYPE_CHECKING:
    from zero_ext.checkpoint import CheckpointReport

app = typer.Typer(
    help="Look into zero_ext checkpoints, export them, describe this machine, measure its NVMe devices, "
    "compile the kernels, simulate steps, plan a training, tune its configuration, "
    "start scripts, import DeepSpeed's checkpoints, draw layouts of sparse attention.",
    no_args_is_help=True,
    add_completion=False,
)
app.add_typer(attention, name="attention")
app.command()(plan)
app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(tune)

Directory = Annotated[Path, typer.Argument(help="A checkpoint, or the directory that holds several.")]
Step = Annotated[int | None, typer.Option(help="Which step; by default the latest.")]


@app.command()
def inspect(
    directory: Directory,
    step: Step = None,
    tensors: Annotated[bool, typer.Option(help="List every parameter and buffer.")] = True,
) -> None:
    """Show what a checkpoint holds and verify every byte; exit status 1 if any is damaged."""
    from zero_ext.checkpoint import inspect_checkpoint

    console = Console()
    with errors_on_stderr():
        report = inspect_checkpoint(directory, step=step)
    _print_summary(console, report)
    if tensors:
        console.print(_tensor_table(report))
    for text in report.damage:
        console.print(f"[red]{escape(printable(text))}", soft_wrap=True)
    if report.damage:
        raise typer.Exit(1)
    console.print(f"every byte of {len(report.file_bytes)} files verified")


@app.command()
def export(
    directory: Directory,
    out: Annotated[Path, typer.Argument(help="Where the safetensors files go; made if missing.")],
    step: Step = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; by default the compute precision.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest file: bytes, or like 5GB, 500MiB.")] = "5GB",
) -> None:
    """Write the weights of a checkpoint as Hugging Face safetensors, one tensor in memory at a time."""
    from zero_ext.checkpoint import export_huggingface

    with errors_on_stderr():
        limit = bytes_of(max_shard_size, "--max-shard-size")
        paths = export_huggingface(directory, out, dtype, limit, step=step)
    for path in paths:
        print(path)


@app.command(name="import-deepspeed")
def import_deepspeed(
    folder: Annotated[
        Path, typer.Argument(help="What DeepSpeed's save_checkpoint was given, or one tag in it.")
    ],
    output: Annotated[Path, typer.Argument(help="Where zero_ext's checkpoint goes; made if missing.")],
    tag: Annotated[
        str | None, typer.Option(help="Like global_step100; by default what 'latest' says.")
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="Class that the model is prepared with, where it is not told: AdamW.")
    ] = None,
    verify: Annotated[bool, typer.Option(help="Compare the checksums of all files beforehand.")] = True,
) -> None:
    """Make a zero_ext checkpoint of one that DeepSpeed's ZeRO stages 1 to 3 wrote; runs nothing in it."""
    from zero_ext.cli.import_deepspeed import import_and_report

    with errors_on_stderr(), cleaned_up_when_ended():
        import_and_report(terminal(), folder, output, tag, optimizer, verify)


@app.command()
def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    measure: Annotated[
        Path | None,
        typer.Option(help="Measure rates too, half a minute, into this JSON for `plan --machine`."),
    ] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="With --measure; by default the devices.")] = None,
    nvme_path: Annotated[Path | None, typer.Option(help="With --measure: a folder on NVMe.")] = None,
) -> None:
    """Describe this machine and installation, for bug reports and for tuning; measure it for planning."""
    from zero_ext.cli.machine.environment import describe_environment

    if measure is not None:
        _measure(measure, ranks, nvme_path, as_json)
        return
    sections = describe_environment(Path.cwd())
    if as_json:
        print(json.dumps(sections, indent=2))
        return
    _print_sections(sections)


def _measure(path: Path, ranks: int | None, nvme_path: Path | None, as_json: bool) -> None:
    from zero_ext.cli.machine import measure_machine

    console = Console(stderr=True)
    with errors_on_stderr(), cleaned_up_when_ended():
        if path.suffix != ".json" or not path.absolute().parent.is_dir():
            raise ValueError(f"--measure is '{path}'; a file ending in .json in an existing folder is wanted")
        machine = measure_machine.measure_machine(
            path.stem, ranks, nvme_path, tick=lambda what: console.print(f"[dim]{escape(what)}")
        )
        measure_machine.write_machine(machine, path)
    if as_json:
        print(json.dumps(machine.to_mapping(), indent=2))
        return
    _print_sections({str(path): measure_machine.figures(machine)})


def _print_sections(sections: dict[str, dict[str, str]]) -> None:
    table = Table("", "", show_header=False)
    for title, facts in sections.items():
        table.add_row(f"[bold]{escape(title)}", "")
        for name, value in facts.items():
            table.add_row(f"  {escape(name)}", escape(value))
        table.add_section()
    terminal().print(table)


@app.command()
def build(
    cuda_architectures: Annotated[
        str | None,
        typer.Option(help="Like 8.0,9.0; by default those of the GPUs here, without one 8.0,9.0."),
    ] = None,
) -> None:
    """Compile now what the first use would: the ops if they are not built, and their CUDA kernels."""
    from zero_ext.cli.machine.prebuild import build_ahead

    with errors_on_stderr():
        for line in build_ahead(cuda_architectures):
            print(line)


@app.command(name="bench-nvme")
def bench_nvme(
    path: Annotated[Path, typer.Argument(help="A directory on the device; its file is removed again.")],
    size: Annotated[str, typer.Option(help="Of the file: bytes, or like 1GiB.")] = "1GiB",
    backends: Annotated[str, typer.Option(help="Like io_uring,threads; by default all there are.")] = "",
    blocks: Annotated[str, typer.Option(help="Sizes of a block.")] = "256KiB,1MiB,4MiB",
    depths: Annotated[str, typer.Option(help="Blocks in flight per I/O thread.")] = "8,32",
    io_threads: Annotated[str, typer.Option(help="I/O threads, each with its own queue.")] = "1,2",
    repeats: Annotated[int, typer.Option(min=1, help="Passes of each; medians are shown.")] = 3,
    output: Annotated[
        Path | None, typer.Option(help="JSON file for the best section; the plot goes beside it as PNG.")
    ] = None,
) -> None:
    """Measure a device with every engine setting and write the best `aio` section."""
    from zero_ext.cli.nvme.bench_nvme import chosen_grid, measure_and_report

    with errors_on_stderr(), cleaned_up_when_ended():
        grid = chosen_grid(backends, blocks, depths, io_threads)
        measure_and_report(terminal(), path, bytes_of(size, "--size"), grid, repeats, output)


@app.command(name="simulate")
def simulate_step(
    model: Annotated[str, typer.Argument(help="Like llama-7b, gpt-175b, gpt-1t.")] = "llama-7b",
    machine: Annotated[str, typer.Option(help="Like dgx2-v100, or a JSON file.")] = "dgx-a100",
    ranks: Annotated[int, typer.Option(min=1, help="GPUs.")] = 8,
    micro_batch: Annotated[int, typer.Option(min=1, help="Samples of a rank's forward.")] = 1,
    accumulation: Annotated[int, typer.Option(min=1, help="Micro-batches of a step.")] = 1,
    config: Annotated[
        Path | None, typer.Option(help="A configuration to simulate; by default the fastest are found.")
    ] = None,
    recompute: Annotated[bool, typer.Option(help="Recompute activations, with --config.")] = True,
    published: Annotated[bool, typer.Option(help="Published runs beside the model, nothing else.")] = False,
) -> None:
    """Simulate a training step on a machine that need not be there; exit status 1 if it would not fit."""
    from zero_ext.cli.planning import simulation_report as tables

    with errors_on_stderr():
        if published:
            tables.print_published(terminal())
            return
        if config is None:
            found = tables.find_placements(model, machine, ranks, micro_batch, accumulation)
        else:
            found = [tables.simulate_config(model, machine, ranks, config, recompute)]
    tables.print_placements(terminal(), found)
    if found[0].shortfalls:
        raise typer.Exit(1)


class _RawArguments(TyperCommand):
    """Leaves all arguments in ``context.args``, ``--`` included, as they were arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        arguments = list(args)
        super().parse_args(ctx, [])
        ctx.args = arguments
        return arguments


@app.command(cls=_RawArguments)
def run(context: typer.Context) -> None:
    """Start a script on several ranks: torchrun's arguments, and --deepspeed-compat."""
    from zero_ext.cli.run import launch

    launch(context.args)


def _print_summary(console: Console, report: CheckpointReport) -> None:
    console.print(
        f"{escape(printable(str(report.path)))}: step {report.step}, saved by {report.world_size} ranks"
    )
    for kind, size in sorted(report.bytes_by_kind.items()):
        console.print(f"  {escape(printable(kind))}: {size:,} bytes")
    for name, size in report.file_bytes.items():
        console.print(f"  {escape(printable(name))}: {size:,} bytes")


def _tensor_table(report: CheckpointReport) -> Table:
    table = Table("name", "shape", "dtype", "stored")
    for tensor in report.tensors:
        name = " = ".join((tensor.name, *tensor.aliases))
        stored = ", ".join(f"{kind} {size:,}" for kind, size in tensor.bytes_by_kind.items())
        table.add_row(escape(printable(name)), str(tensor.shape), tensor.dtype, escape(printable(stored)))
    return table
