"""Whole weights in one file, for those who read no other format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from zero_ext.checkpoint.files import Filesystem
from zero_ext.checkpoint.weights.hf_export import write_file
from zero_ext.zero.engine import Engine
from zero_ext.zero.units.collective_errors import raise_on_all_ranks


def write_weights(engine: Engine, values: Mapping[str, torch.Tensor] | None, path: Path) -> None:
    """Write ``values``, which rank 0 has, to ``path``: whole or not at all, and an error on all ranks if it
    fails; a collective. The suffix ``.safetensors`` chooses the format."""
    raise_on_all_ranks(
        engine.collectives,
        lambda: _write(values, path) if values is not None else None,
        f"writing {path}",
    )


def _write(values: Mapping[str, torch.Tensor], path: Path) -> None:
    filesystem = Filesystem()
    filesystem.make_directory(path.parent.absolute())
    partial = path.with_name(f".partial-{path.name}")
    try:
        write_file(filesystem, partial, values, pickled=path.suffix != ".safetensors")
        filesystem.rename(partial, path)
    finally:
        filesystem.remove(partial)
