"""The plan that assigns tensors of foreign weight files to parameters and buffers of a model, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from zero_ext.checkpoint.format.safetensors_header import StoredTensor
from zero_ext.checkpoint.format.state_source import BUFFER, MASTER
from zero_ext.checkpoint.transfer.read_plan import FillTarget
from zero_ext.checkpoint.weights.safetensors_files import WeightFiles
from zero_ext.zero.api.engine_lookup import checkpoint_sources
from zero_ext.zero.engine import Engine

Rename = Callable[[str], str] | Mapping[str, str]
_MOST_PROBLEMS_SHOWN = 5


@dataclass(frozen=True)
class WeightsPlan:
    """The plan of this rank: the slices of every parameter and buffer, by its first name in the model.

    ``keys`` are the names in the files, ``orders`` shape and stride in the model. ``buffers`` are live ones,
    each with the copy that is filled first.
    """

    files: WeightFiles
    keys: Mapping[str, str]
    orders: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    targets: Mapping[str, list[FillTarget]]
    buffers: list[tuple[torch.Tensor, torch.Tensor]]
    missing: list[str]
    unexpected: list[str]

    def stored(self, name: str) -> tuple[int, StoredTensor]:
        """Return the file and the stored tensor that fills the parameter or buffer ``name``."""
        return self.files.tensors[self.keys[name]]


def plan_weights(engine: Engine, files: WeightFiles, strict: bool, rename: Rename | None) -> WeightsPlan:
    """Return the plan for the model of ``engine``. ``ValueError`` names what is missing or unexpected, if
    ``strict``, or does not fit, always."""
    key_of = _renamed(files, rename)
    specs = _tensor_specs(engine)
    names = _names(engine)
    keys: dict[str, str] = {}
    problems: list[str] = []
    for alias, name in names.items():
        if alias in key_of:
            keys[name] = key_of[alias]  # the last of several names counts, as it does for torch
            problems += _misfit(alias, specs[name], files.tensors[key_of[alias]][1])
    if problems:
        shown = "; ".join(problems[:_MOST_PROBLEMS_SHOWN])
        left = len(problems) - _MOST_PROBLEMS_SHOWN
        more = f" and {left} more" if left > 0 else ""
        raise ValueError(
            f"weights: they do not fit the model: {shown}{more}. Pass the weights of this model."
        )
    missing = [name for name in specs if name not in keys]
    unexpected = [alias for alias in key_of if alias not in names]
    if strict and (missing or unexpected):
        raise ValueError(
            f"weights: they lack {missing} and have {unexpected}, which the model does not. Pass 'rename' if "
            "they have other names there, or strict=False to leave them."
        )
    targets: dict[str, list[FillTarget]] = {name: [] for name in keys}
    for needed in checkpoint_sources(engine).own.load_slices():
        if needed.kind == MASTER and needed.name in targets:
            values = needed.tensor.detach() if isinstance(needed.tensor, torch.Tensor) else needed.tensor
            targets[needed.name].append(FillTarget(MASTER, needed.name, needed.start, values))
    buffers = []
    for name, buffer in checkpoint_sources(engine).own.buffers().items():
        if name in targets:
            copy = torch.empty(buffer.numel(), dtype=buffer.dtype, device="cpu")
            buffers.append((buffer, copy))
            targets[name].append(FillTarget(BUFFER, name, 0, copy))
    orders = {name: (spec.shape, spec.stride) for name, spec in specs.items()}
    return WeightsPlan(files, keys, orders, targets, buffers, missing, unexpected)


@dataclass(frozen=True)
class _TensorSpec:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def _tensor_specs(engine: Engine) -> dict[str, _TensorSpec]:
    """Parameters, tiles put together, and buffers, each under its first name."""
    found = {}
    for name, entry in checkpoint_sources(engine).own.parameter_table().items():
        found[name] = _TensorSpec(entry.shape, entry.stride, getattr(torch, entry.dtype))
    names = _names(engine)
    for name, buffer in checkpoint_sources(engine).own.buffers().items():
        if names[name] == name:
            shape = tuple(buffer.shape)
            found[name] = _TensorSpec(shape, torch.empty(shape, device="meta").stride(), buffer.dtype)
    return found


def _names(engine: Engine) -> dict[str, str]:
    """Return the first name of every parameter and buffer, by each of its names."""
    found = {}
    for name, parameter in engine.model.named_parameters(remove_duplicate=False):
        found[engine.full_tensors.name(name)] = engine.full_tensors.name(engine.names[parameter][0])
    first: dict[int, str] = {}
    for name, buffer in checkpoint_sources(engine).own.buffers().items():
        found[name] = first.setdefault(id(buffer), name)
    return found


def _renamed(files: WeightFiles, rename: Rename | None) -> dict[str, str]:
    """Return the tensors' names in the files by those in the model."""
    found: dict[str, str] = {}
    for key in files.tensors:
        name = key if rename is None else rename(key) if callable(rename) else rename.get(key, key)
        if not isinstance(name, str):
            raise TypeError(f"rename: expected a name for {key!r}, got {name!r}. Let it give text.")
        if name in found:
            raise ValueError(
                f"rename: expected a name of its own for each tensor, got {name!r} for both {found[name]!r} "
                f"and {key!r}. Give one of them another name."
            )
        found[name] = key
    return found


def _misfit(name: str, spec: _TensorSpec, tensor: StoredTensor) -> list[str]:
    problems = []
    if tensor.entry.shape != spec.shape:
        problems.append(f"{name!r}: expected shape {spec.shape}, got {tensor.entry.shape}")
    both_float = tensor.entry.dtype.is_floating_point and spec.dtype.is_floating_point
    if tensor.entry.dtype != spec.dtype and not both_float:
        problems.append(f"{name!r}: expected {spec.dtype}, got {tensor.entry.dtype}")
    return problems
