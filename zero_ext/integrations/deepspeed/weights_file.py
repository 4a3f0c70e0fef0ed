"""Whole weights in one file, for those who read no other format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from zero_ext.checkpoint.dtypes import SAFETENSORS_CODES
from zero_ext.checkpoint.host_memory import byte_view
from zero_ext.checkpoint.safetensors_header import TensorEntry, encode_header
from zero_ext.checkpoint.storage import Storage
from zero_ext.checkpoint.stream_writer import StreamWriter
from zero_ext.zero.engine import Engine
from zero_ext.zero.together import together


def write_weights(engine: Engine, values: Mapping[str, torch.Tensor] | None, path: Path) -> None:
    """Writes ``values``, which rank 0 has, to ``path``: whole or not at all, and an error on all ranks if it
    fails; a collective. The suffix ``.safetensors`` chooses the format."""
    together(
        engine.collectives,
        lambda: _write(values, path) if values is not None else None,
        f"writing {path}",
    )


def _write(values: Mapping[str, torch.Tensor], path: Path) -> None:
    storage = Storage()
    storage.make_directory(path.parent.absolute())
    partial = path.with_name(f".partial-{path.name}")
    storage.remove(partial)
    try:
        if path.suffix == ".safetensors":
            _write_safetensors(storage, values, partial)
        else:
            # Exclusive: the target of a symbolic link that somebody else puts here is not overwritten.
            with partial.open("xb") as file:
                torch.save(dict(values), file)
        storage.rename(partial, path)
    finally:
        storage.remove(partial)


def _write_safetensors(storage: Storage, values: Mapping[str, torch.Tensor], path: Path) -> None:
    # Of tied names, which have one tensor, the first is written.
    first = {id(tensor): name for name, tensor in reversed(list(values.items()))}
    kept = {name: tensor for name, tensor in values.items() if first[id(tensor)] == name}
    # Wider elements first, so that every tensor lies at a multiple of its own element size.
    names = sorted(kept, key=lambda name: -kept[name].dtype.itemsize)
    for name in names:
        if kept[name].dtype not in SAFETENSORS_CODES:
            raise ValueError(f"{name}: safetensors has no {kept[name].dtype}; give another file name")
    entries = [TensorEntry(name, kept[name].dtype, tuple(kept[name].shape)) for name in names]
    with StreamWriter(storage, path) as writer:
        writer.append(
            torch.frombuffer(bytearray(encode_header(entries, {"format": "pt"})), dtype=torch.uint8)
        )
        for name in names:
            writer.append(byte_view(kept[name].contiguous().view(-1)))
        writer.finish()
