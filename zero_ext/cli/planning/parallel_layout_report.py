"""The best layouts of a model over a cluster as a table, as JSON and as a configuration."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zero_ext.config import ZeroConfig
from zero_ext.plan.layout import FoundLayout, LayoutRequest, ParallelLayout
from zero_ext.plan.layout.explain import reasons_of
from zero_ext.plan.parse_sizes import short_bytes
from zero_ext.plan.plan_entry import TIERS
from zero_ext.plan.write_config import DEFAULT_NVME_PATH, config_of


def print_layouts(console: Console, wanted: LayoutRequest, found: Sequence[FoundLayout]) -> None:
    """Print the layouts with their reasons, and what to write for the first."""
    table = Table(title=f"{wanted.model.name} on {wanted.gpus} GPUs of {wanted.hardware.name}")
    for name in ("pp", "dp", "tp", "ZeRO", "micro-batch", "memory", "s/step", "tokens/s"):
        table.add_column(name, justify="left" if name == "ZeRO" else "right", no_wrap=True)
    for one in found:
        layout, training = one.layout, one.layout.training
        table.add_row(
            *(str(length) for length in (layout.pp, layout.dp, layout.tp)),
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
    console.print(json.dumps(_said(_config(wanted, best))), markup=False, soft_wrap=True)


def layouts_as_json(wanted: LayoutRequest, found: Sequence[FoundLayout]) -> dict[str, Any]:
    """Return everything that the table shows, in bytes and seconds."""
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
                "bytes": {tier: getattr(one.fullest.needs, tier) for tier in TIERS},
                "fullest_stage": one.fullest.stage,
                "seconds": one.time.components,
                "step_seconds": one.time.seconds,
                "tokens_per_second": _tokens_per_second(wanted, one),
                "reasons": reasons_of(one, wanted.hardware),
                "calls": _calls(one.layout),
                "config": _said(_config(wanted, one.layout)),
            }
            for one in found
        ],
    }


def write_layout(wanted: LayoutRequest, found: FoundLayout, path: Path, nvme_paths: tuple[str, ...]) -> None:
    """Write the configuration of a layout to a file."""
    config = _config(wanted, found.layout, nvme_paths or (DEFAULT_NVME_PATH,))
    path.write_text(json.dumps(_said(config), indent=2) + "\n", encoding="utf-8")


def _tokens_per_second(wanted: LayoutRequest, found: FoundLayout) -> float:
    return wanted.samples * wanted.model.shape.sequence / found.time.seconds


def _config(
    wanted: LayoutRequest, layout: ParallelLayout, nvme_paths: tuple[str, ...] = (DEFAULT_NVME_PATH,)
) -> ZeroConfig:
    return config_of(wanted.model, layout.training, nvme_paths, tiles=layout.tp == 1)


def _said(config: ZeroConfig) -> dict[str, Any]:
    return config.model_dump(mode="json", exclude_unset=True)


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
