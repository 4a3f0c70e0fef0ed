"""``zero-ext attention``: plots of layouts of sparse attention."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zero_ext.cli.console import errors_on_stderr, print_json
from zero_ext.cli.options import AsJson, ConfigFile, examples, output, taking
from zero_ext.config import SparseAttentionConfig, load_config
from zero_ext.config.sparse_attention import MOST_HEADS
from zero_ext.plan.parse_sizes import short_bytes

if TYPE_CHECKING:
    from zero_ext.attention import BlockLayout

attention = typer.Typer(no_args_is_help=True)
_SUFFIXES = (".png", ".svg", ".pdf")


@attention.callback(epilog=examples("attention plot fixed --causal"))
def _group() -> None:
    """Which blocks does a sparse attention compute?"""


@dataclass(frozen=True)
class PlotOptions:
    """The options of ``zero-ext attention plot``."""

    mode: Annotated[
        str | None,
        typer.Argument(
            metavar="MODE", help="dense, fixed, variable, bigbird, bslongformer or local_sliding_window."
        ),
    ] = None
    seq: Annotated[int, typer.Option(min=1, help="Tokens per sample.")] = 4096
    block: Annotated[int | None, typer.Option(help="Tokens per side of a block: 16, 32, 64 or 128.")] = None
    heads: Annotated[int, typer.Option(min=1, max=MOST_HEADS, help="Query heads.")] = 1
    causal: Annotated[bool, typer.Option("--causal", help="Attend to no later token.")] = False
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any other key, such as num_local_blocks=8. May be repeated."),
    ] = None
    config: ConfigFile = None
    plot: Annotated[Path, output("File of the plot: .png, .svg or .pdf.")] = Path("layout.png")
    as_json: AsJson = False


@attention.command(
    epilog=examples(
        "attention plot fixed --causal",
        "attention plot bigbird --seq 1024 --block 64 --set seed=5 --plot layout.svg",
    )
)
@taking(PlotOptions)
def plot(options: PlotOptions) -> None:
    """Which blocks does this sparse attention compute, and how many are they?

    Draws the layout of a mode, or of the sparse_attention section of --config.
    """
    with errors_on_stderr():
        if options.plot.suffix not in _SUFFIXES or not options.plot.absolute().parent.is_dir():
            raise ValueError(
                f"--plot: expected a file ending in {', '.join(_SUFFIXES)} in a folder that exists, got "
                f"'{options.plot}'. Make the folder or name another file."
            )
        policy = policy_of(options)
        from zero_ext.attention import build_layout
        from zero_ext.attention.plot_layout import plot_layout

        layout = build_layout(policy, options.heads, options.seq, causal=options.causal)
        plot_layout(layout, options.plot, _title(policy, options))
    if options.as_json:
        print_json(layout_as_json(layout) | {"plot": str(options.plot)})
        return
    for line in facts(layout):
        print(line)
    print(options.plot)


def policy_of(options: PlotOptions) -> SparseAttentionConfig:
    """Return the policy that the options ask for. Raises ValueError (ConfigError) naming what cannot be."""
    values: dict[str, Any] = {}
    if options.config is not None:
        section = load_config(options.config).sparse_attention
        if section is None:
            raise ValueError(
                f"--config: expected a sparse_attention section, got none in {options.config}. Add one or "
                "name a mode."
            )
        values = section.model_dump(mode="json", exclude_unset=True)
    elif options.mode is None:
        raise ValueError("MODE: expected a mode or --config FILE, got neither. Name a mode such as fixed.")
    if options.mode is not None:
        values["mode"] = options.mode
    if options.block is not None:
        values["block"] = options.block
    for text in options.set_ or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--set: expected key=value, got {text!r}. Write for example block=64.")
        values[name] = _value(value)
    return SparseAttentionConfig.from_mapping(values)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _title(policy: SparseAttentionConfig, options: PlotOptions) -> str:
    causal = options.causal or policy.unidirectional
    return f"{policy.mode}, {'unidirectional' if causal else 'bidirectional'}, {options.seq:,} tokens"


def facts(layout: BlockLayout) -> list[str]:
    """Return the number of blocks and their bytes as lines."""
    return [
        f"{layout.blocks:,} blocks of {layout.block} × {layout.block} in {layout.heads} layout(s), "
        f"{layout.density:.2%} of all",
        f"{short_bytes(layout.nbytes)} with the transposed copy",
    ]


def layout_as_json(layout: BlockLayout) -> dict[str, Any]:
    """Return the same as numbers."""
    return {
        "blocks": layout.blocks,
        "block": layout.block,
        "layouts": layout.heads,
        "density": layout.density,
        "bytes": layout.nbytes,
    }
