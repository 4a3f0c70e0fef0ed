"""``zero-ext attention``: pictures of layouts of sparse attention."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zero_ext.cli.console import errors_on_stderr
from zero_ext.cli.dataclass_options import taking
from zero_ext.config import SparseAttentionConfig, load_config
from zero_ext.config.parse_sizes import short_bytes
from zero_ext.config.sections.sparse_attention import MOST_HEADS

if TYPE_CHECKING:
    from zero_ext.attention import BlockLayout

attention = typer.Typer(help="Look at layouts of sparse attention.", no_args_is_help=True)
_SUFFIXES = (".png", ".svg", ".pdf")


@attention.callback()
def _group() -> None:
    """Look at layouts of sparse attention."""


@dataclass(frozen=True)
class PlotOptions:
    """The options of ``zero-ext attention plot``."""

    mode: Annotated[
        str | None,
        typer.Argument(help="dense, fixed, variable, bigbird, bslongformer or local_sliding_window."),
    ] = None
    length: Annotated[int, typer.Option(min=1, help="Tokens.")] = 4096
    block: Annotated[int | None, typer.Option(help="Tokens of a block's side: 16, 32, 64 or 128.")] = None
    heads: Annotated[int, typer.Option(min=1, max=MOST_HEADS, help="Query heads.")] = 1
    causal: Annotated[bool, typer.Option(help="Attend to no later token.")] = False
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any other key, like num_local_blocks=8; may be repeated."),
    ] = None
    config: Annotated[
        Path | None, typer.Option(help="A configuration whose sparse_attention section is drawn.")
    ] = None
    out: Annotated[Path, typer.Option(help="The picture: .png, .svg or .pdf.")] = Path("layout.png")


@attention.command()
@taking(PlotOptions)
def plot(options: PlotOptions) -> None:
    """Draw the blocks that a layout computes, and print how many they are."""
    with errors_on_stderr():
        if options.out.suffix not in _SUFFIXES or not options.out.absolute().parent.is_dir():
            raise ValueError(
                f"--out is '{options.out}'; a file ending in {', '.join(_SUFFIXES)} in an existing "
                "folder is wanted"
            )
        policy = policy_of(options)
        from zero_ext.attention import build_layout
        from zero_ext.attention.plot_layout import plot_layout

        layout = build_layout(policy, options.heads, options.length, causal=options.causal)
        plot_layout(layout, options.out, _title(policy, options))
    for line in facts(layout):
        print(line)
    print(options.out)


def policy_of(options: PlotOptions) -> SparseAttentionConfig:
    """The policy that the options ask for. Raises ValueError (ConfigError) naming what cannot be."""
    values: dict[str, Any] = {}
    if options.config is not None:
        section = load_config(options.config).sparse_attention
        if section is None:
            raise ValueError(f"--config: {options.config} has no sparse_attention section")
        values = section.model_dump(mode="json", exclude_unset=True)
    elif options.mode is None:
        raise ValueError("give a mode like fixed, or --config FILE")
    if options.mode is not None:
        values["mode"] = options.mode
    if options.block is not None:
        values["block"] = options.block
    for text in options.set_ or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--set is {text!r}; key=value is wanted")
        values[name] = _value(value)
    return SparseAttentionConfig.from_mapping(values)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _title(policy: SparseAttentionConfig, options: PlotOptions) -> str:
    causal = options.causal or policy.unidirectional
    return f"{policy.mode}, {'unidirectional' if causal else 'bidirectional'}, {options.length:,} tokens"


def facts(layout: BlockLayout) -> list[str]:
    """What the picture's title says, and the bytes."""
    return [
        f"{layout.blocks:,} blocks of {layout.block} × {layout.block} in {layout.heads} layout(s), "
        f"{layout.density:.2%} of all",
        f"{short_bytes(layout.nbytes)} with the transposed copy",
    ]
