"""Does a checkpoint fit a model? The same parameters and buffers, one by one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from zero_ext.checkpoint.format.dtypes import dtype_named
from zero_ext.checkpoint.format.manifest import Manifest, ParameterRecord
from zero_ext.checkpoint.format.memory_order import memory_order
from zero_ext.checkpoint.format.state_source import ParameterDescription

_MOST_PROBLEMS_SHOWN = 5


def match_parameters(
    manifest: Manifest, table: Mapping[str, ParameterDescription], path: Path
) -> dict[str, str]:
    """Return the name in the checkpoint of each parameter of the model; they differ only where tied names do.

    ValueError lists the parameters that are missing, unexpected, tied otherwise, of another shape, or in
    another memory order. The compute precision and whether a parameter is trained may differ.
    """
    by_any_name = {
        alias: name for name, entry in manifest.parameters.items() for alias in (name, *entry.aliases)
    }
    found: dict[str, str] = {}
    problems = []
    for name, entry in table.items():
        stored = by_any_name.get(name)
        if stored is None:
            problems.append(f"parameter {name!r} is missing in the checkpoint")
            continue
        found[name] = stored
        problem = _difference({name, *entry.aliases}, entry, stored, manifest.parameters[stored])
        if problem:
            problems.append(f"parameter {name!r}: {problem}")
    unexpected = manifest.parameters.keys() - set(found.values())
    problems.extend(f"parameter {name!r} is not in the model" for name in sorted(unexpected))
    _refuse(problems, path)
    return found


def match_buffers(manifest: Manifest, buffers: Mapping[str, torch.Tensor], path: Path) -> None:
    """ValueError lists the buffers that are missing, unexpected, of another shape or kind of dtype."""
    problems = []
    for name, buffer in buffers.items():
        record = manifest.buffers.get(name)
        if record is None:
            problems.append(f"buffer {name!r} is missing in the checkpoint")
        elif list(buffer.shape) != record.shape:
            problems.append(f"buffer {name!r}: expected shape {list(buffer.shape)}, got {record.shape}")
        elif dtype_named(record.dtype) != buffer.dtype and not (
            dtype_named(record.dtype).is_floating_point and buffer.dtype.is_floating_point
        ):
            problems.append(f"buffer {name!r}: expected {buffer.dtype}, got {record.dtype}")
    unexpected = manifest.buffers.keys() - buffers.keys()
    problems.extend(f"buffer {name!r} is not in the model" for name in sorted(unexpected))
    _refuse(problems, path)


def _difference(
    names: set[str], entry: ParameterDescription, stored: str, record: ParameterRecord
) -> str | None:
    if names != {stored, *record.aliases}:
        return f"expected the names {_listed(names)}, got {_listed({stored, *record.aliases})}"
    if list(entry.shape) != record.shape:
        return f"expected shape {list(entry.shape)}, got {record.shape}"
    if memory_order(entry.shape, entry.stride) != memory_order(record.shape, record.stride):
        return f"expected stride {list(entry.stride)}, got {record.stride}, another memory format"
    return None


def _refuse(problems: Iterable[str], path: Path) -> None:
    listed = list(problems)
    if listed:
        shown = "; ".join(listed[:_MOST_PROBLEMS_SHOWN])
        left = len(listed) - _MOST_PROBLEMS_SHOWN
        more = f" and {left} more" if left > 0 else ""
        raise ValueError(
            f"{path}: it does not fit this model: {shown}{more}. Build the model as it was saved, with the "
            "same names, ties, shapes and memory formats, or load another checkpoint."
        )


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))
