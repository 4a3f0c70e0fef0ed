"""Which tensors of foreign weight files fill which parameters and buffers of a model; all checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from zero_ext.checkpoint.format.safetensors_header import StoredTensor
from zero_ext.checkpoint.format.state_source import BUFFER, MASTER
from zero_ext.checkpoint.transfer.read_plan import Wanted
from zero_ext.checkpoint.weights.safetensors_files import WeightFiles
from zero_ext.zero.engine import Engine

Rename = Callable[[str], str] | Mapping[str, str]
_MOST_PROBLEMS_SHOWN = 5


@dataclass(frozen=True)
class WeightsPlan:
    """What this rank fills: the runs of every parameter and buffer, by its first name in the model.

    ``keys`` are the names in the files, ``orders`` shape and stride in the model. ``buffers`` are live ones,
    each with the copy that is filled first.
    """

    files: WeightFiles
    keys: Mapping[str, str]
    orders: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    runs: Mapping[str, list[Wanted]]
    buffers: list[tuple[torch.Tensor, torch.Tensor]]
    missing: list[str]
    unexpected: list[str]

    def stored(self, name: str) -> tuple[int, StoredTensor]:
        """File and place of what fills the parameter or buffer ``name``."""
        return self.files.tensors[self.keys[name]]


def plan_weights(engine: Engine, files: WeightFiles, strict: bool, rename: Rename | None) -> WeightsPlan:
    """The plan for the model of ``engine``. ``ValueError`` names what is missing or unexpected, if
    ``strict``, or does not fit, always."""
    key_of = _renamed(files, rename)
    targets = _targets(engine)
    names = _names(engine)
    keys: dict[str, str] = {}
    problems: list[str] = []
    for alias, name in names.items():
        if alias in key_of:
            keys[name] = key_of[alias]  # the last of several names counts, as it does for torch
            problems += _misfit(alias, targets[name], files.tensors[key_of[alias]][1])
    if problems:
        shown = "; ".join(problems[:_MOST_PROBLEMS_SHOWN])
        left = len(problems) - _MOST_PROBLEMS_SHOWN
        raise ValueError(f"the weights do not fit: {shown}{f'; and {left} more' if left > 0 else ''}")
    missing = [name for name in targets if name not in keys]
    unexpected = [alias for alias in key_of if alias not in names]
    if strict and (missing or unexpected):
        raise ValueError(
            f"the weights lack {missing} and have {unexpected}, which the model does not; give 'rename' if "
            "they have other names there, or strict=False to leave them"
        )
    runs: dict[str, list[Wanted]] = {name: [] for name in keys}
    for piece in engine.state.load_pieces():
        if piece.kind == MASTER and piece.name in runs:
            values = piece.tensor.detach() if isinstance(piece.tensor, torch.Tensor) else piece.tensor
            runs[piece.name].append(Wanted(MASTER, piece.name, piece.start, values))
    buffers = []
    for name, buffer in engine.state.buffers().items():
        if name in runs:
            copy = torch.empty(buffer.numel(), dtype=buffer.dtype, device="cpu")
            buffers.append((buffer, copy))
            runs[name].append(Wanted(BUFFER, name, 0, copy))
    orders = {name: (target.shape, target.stride) for name, target in targets.items()}
    return WeightsPlan(files, keys, orders, runs, buffers, missing, unexpected)


@dataclass(frozen=True)
class _Target:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def _targets(engine: Engine) -> dict[str, _Target]:
    """Parameters, tiles put together, and buffers, each under its first name."""
    found = {}
    for name, entry in engine.state.parameter_table().items():
        found[name] = _Target(entry.shape, entry.stride, getattr(torch, entry.dtype))
    names = _names(engine)
    for name, buffer in engine.state.buffers().items():
        if names[name] == name:
            shape = tuple(buffer.shape)
            found[name] = _Target(shape, torch.empty(shape, device="meta").stride(), buffer.dtype)
    return found


def _names(engine: Engine) -> dict[str, str]:
    """The first name of every parameter and buffer, by each of its names."""
    found = {}
    for name, parameter in engine.model.named_parameters(remove_duplicate=False):
        found[engine.wholes.name(name)] = engine.wholes.name(engine.names[parameter][0])
    first: dict[int, str] = {}
    for name, buffer in engine.state.buffers().items():
        found[name] = first.setdefault(id(buffer), name)
    return found


def _renamed(files: WeightFiles, rename: Rename | None) -> dict[str, str]:
    """The tensors' names in the files by those in the model."""
    found: dict[str, str] = {}
    for key in files.tensors:
        name = key if rename is None else rename(key) if callable(rename) else rename.get(key, key)
        if not isinstance(name, str):
            raise TypeError(f"rename gives {name!r} for {key!r}; a name wanted")
        if name in found:
            raise ValueError(f"rename gives {name!r} for both {found[name]!r} and {key!r}")
        found[name] = key
    return found


def _misfit(name: str, target: _Target, tensor: StoredTensor) -> list[str]:
    problems = []
    if tensor.entry.shape != target.shape:
        problems.append(f"{name!r} has shape {tensor.entry.shape}, the model's {target.shape}")
    both_float = tensor.entry.dtype.is_floating_point and target.dtype.is_floating_point
    if tensor.entry.dtype != target.dtype and not both_float:
        problems.append(f"{name!r} is {tensor.entry.dtype}, the model's {target.dtype}")
    return problems
