"""The fp32 weights of a DeepSpeed checkpoint, under the names of DeepSpeed's ``zero_to_fp32``."""

from __future__ import annotations

import dataclasses
import os
import re
import tempfile
from pathlib import Path

import torch
from torch import nn

from zero_ext.checkpoint import export_huggingface
from zero_ext.checkpoint.dtypes import dtype_named
from zero_ext.checkpoint.errors import shortened
from zero_ext.integrations.deepspeed.checkpoint_import import read_checkpoint, step_of
from zero_ext.integrations.deepspeed.checkpoint_rank import RankState
from zero_ext.integrations.deepspeed.checkpoint_source import DeepSpeedCheckpoint, Trained
from zero_ext.integrations.deepspeed.checkpoint_write import run_of, weights_manifest, write_checkpoint

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_UNLIMITED = 1 << 62
_SHORT_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_MOST_NAMES_SHOWN = 5

Checkpoint = str | os.PathLike[str]


class LazyTensor:
    """A parameter or buffer whose fp32 values are put together when ``contiguous`` is called."""

    def __init__(self, weights: _Weights, name: str, shape: torch.Size, dtype: torch.dtype) -> None:
        self._weights = weights
        self._name = name
        self.shape = shape
        self.dtype = dtype

    def contiguous(self) -> torch.Tensor:
        """A new tensor with its values."""
        return self._weights.whole(self._name)


class _Weights:
    """The values of a checkpoint by name, mapped from the files of all ranks."""

    def __init__(self, checkpoint: DeepSpeedCheckpoint) -> None:
        self.checkpoint = checkpoint
        self._ranks: dict[int, RankState] = {}
        self._frozen: dict[int, dict[str, torch.Tensor]] = {}

    def lazy(self) -> dict[str, LazyTensor]:
        """Every parameter and buffer under each of its names."""
        found = {}
        for name, entry in self.checkpoint.parameters.items():
            tensor = LazyTensor(self, name, torch.Size(entry.shape), torch.float32)
            found.update(dict.fromkeys((name, *self.checkpoint.aliases.get(name, ())), tensor))
        for name, buffer in self.checkpoint.buffers.items():
            dtype = torch.float32 if buffer.dtype.is_floating_point else buffer.dtype
            found[name] = LazyTensor(self, name, buffer.shape, dtype)
        return found

    def whole(self, name: str) -> torch.Tensor:
        """One of them."""
        if name in self.checkpoint.buffers:
            buffer = self.checkpoint.buffers[name]
            return buffer.to(torch.float32 if buffer.dtype.is_floating_point else buffer.dtype, copy=True)
        entry = self.checkpoint.parameters[name]
        found = torch.empty(entry.shape, dtype=torch.float32, device="cpu")
        flat = found.view(-1)
        for part in entry.fragments:
            if isinstance(entry, Trained):
                values = run_of(self._rank(part.rank).masters[part.flat], part)
            else:
                values = self._frozen_of(part.rank)[name]
            flat[part.start : part.start + part.numel].copy_(values)
        return found

    def _rank(self, rank: int) -> RankState:
        if rank not in self._ranks:
            self._ranks[rank] = self.checkpoint.rank(rank)
        return self._ranks[rank]

    def _frozen_of(self, rank: int) -> dict[str, torch.Tensor]:
        if rank not in self._frozen:
            self._frozen[rank] = self.checkpoint.frozen_values(rank)
        return self._frozen[rank]


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Checkpoint,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, torch.Tensor] | dict[str, LazyTensor]:
    """All parameters in float32, tied ones under each of their names, and the buffers, of the checkpoint
    ``checkpoint_dir/tag`` (by default that of the file ``latest``).

    With ``lazy_mode`` the values have ``shape`` and ``dtype``, and ``contiguous()`` that makes the tensor:
    then only those asked for are in memory. CheckpointError as in :func:`import_deepspeed_checkpoint`.
    """
    lazy = _Weights(_read(checkpoint_dir, tag, exclude_frozen_parameters)).lazy()
    if lazy_mode:
        return lazy
    made = {id(tensor): tensor.contiguous() for tensor in {id(each): each for each in lazy.values()}.values()}
    return {name: made[id(tensor)] for name, tensor in lazy.items()}


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: Checkpoint, tag: str | None = None
) -> nn.Module:
    """Fills ``model``, moved to the CPU, with the weights of a checkpoint, one tensor at a time; the model.

    ``ValueError`` names parameters and buffers that are missing, unexpected or of another shape, and nothing
    has changed then.
    """
    weights = _Weights(_read(checkpoint_dir, tag, exclude_frozen=False))
    lazy = weights.lazy()
    live = model.cpu().state_dict(keep_vars=True)
    problems = [f"{name!r} is missing in the checkpoint" for name in live.keys() - lazy.keys()]
    problems += [f"{name!r} is not in the model" for name in lazy.keys() - live.keys()]
    problems += [
        f"{name!r} has shape {tuple(lazy[name].shape)}, the model's {tuple(value.shape)}"
        for name, value in live.items()
        if name in lazy and lazy[name].shape != value.shape
    ]
    if problems:
        shown = "; ".join(shortened(problem, 300) for problem in sorted(problems)[:_MOST_NAMES_SHOWN])
        raise ValueError(
            f"{weights.checkpoint.files.path} does not fit this model: {shown} ({len(problems)} in all)"
        )
    with torch.no_grad():
        for name, value in live.items():
            value.copy_(lazy[name].contiguous())
    return model


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: Checkpoint,
    output_dir: Checkpoint,
    dtype: torch.dtype | str = torch.float32,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = True,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> list[Path]:
    """Writes the weights as safetensors in ``dtype`` (float32, float16 or bfloat16) to ``output_dir``, with
    an index if there are several; returns the files. Of tied names the first is written.

    Never more than a few MiB are in memory; the folder above ``output_dir`` needs room for the weights a
    second time while this runs. ``ValueError`` for another dtype or size, or ``safe_serialization=False``,
    which would write a pickle; ``CheckpointError`` as in :func:`import_deepspeed_checkpoint`.
    """
    if not safe_serialization:
        raise ValueError(
            "safe_serialization=False would write pickles, which zero_ext does not; leave it True and read "
            "the files with safetensors.torch.load_file"
        )
    wanted, limit = _dtype_of(dtype), _bytes_of(max_shard_size)
    checkpoint = _read(checkpoint_dir, tag, exclude_frozen_parameters)
    buffers = {
        name: buffer.to(wanted) if buffer.dtype.is_floating_point else buffer
        for name, buffer in checkpoint.buffers.items()
    }
    checkpoint = dataclasses.replace(checkpoint, buffers=buffers)
    manifest = weights_manifest(checkpoint, step_of(checkpoint))
    target = Path(output_dir).absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".zero_ext-weights-", dir=target.parent) as scratch:
        write_checkpoint(checkpoint, manifest, Path(scratch), moments=False)
        return export_huggingface(scratch, target, wanted, limit)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: Checkpoint,
    output_dir: Checkpoint,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = True,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> list[Path]:
    """:func:`convert_zero_checkpoint_to_state_dict` in float32."""
    return convert_zero_checkpoint_to_state_dict(
        checkpoint_dir,
        output_dir,
        torch.float32,
        max_shard_size,
        safe_serialization,
        tag,
        exclude_frozen_parameters,
    )


def _read(folder: Checkpoint, tag: str | None, exclude_frozen: bool) -> DeepSpeedCheckpoint:
    checkpoint = read_checkpoint(folder, tag)
    return dataclasses.replace(checkpoint, frozen={}) if exclude_frozen else checkpoint


def _dtype_of(dtype: torch.dtype | str) -> torch.dtype:
    name = str(dtype).lower().removeprefix("torch.")
    name = _SHORT_NAMES.get(name, name)
    if name not in _SHORT_NAMES.values():
        raise ValueError(f"dtype is {dtype!r}; give one of {', '.join(_SHORT_NAMES.values())}")
    return dtype_named(name)


def _bytes_of(size: str | int | None) -> int:
    if size is None:
        return _UNLIMITED
    if type(size) is int and size > 0:
        return size
    found = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if found is None or float(found[1]) <= 0:
        raise ValueError(
            f"max_shard_size is {size!r}; give bytes, or a number with a unit like '5GB', '500MiB'"
        )
    base = 1024 if found[3] else 1000
    return max(1, int(float(found[1]) * base ** _POWERS[found[2].upper()]))
