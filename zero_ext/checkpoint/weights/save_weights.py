"""The weights of a prepared model in safetensors, written a tensor at a time: nobody holds them all."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from zero_ext.checkpoint.format.manifest import CHUNK_BYTES
from zero_ext.checkpoint.format.tensor_files import SAFETENSORS_CODES
from zero_ext.checkpoint.weights.hf_export import LazyTensor, write_weights
from zero_ext.zero.api.engine_lookup import checkpoint_sources, engine_of
from zero_ext.zero.api.engine_state import ModelParallelState
from zero_ext.zero.api.full_parameters import FullSource, first_buffers, full_sources, full_values
from zero_ext.zero.engine import Engine
from zero_ext.zero.units.collective_errors import raise_on_all_ranks

Convert = Callable[[str, torch.Tensor], Mapping[str, torch.Tensor]]
"""From a tensor of the model, by its first name, to those of the files; on the meta device too."""

MOST_BYTES = 50_000_000_000


def save_weights(
    model: nn.Module, folder: str | os.PathLike[str], *, max_file_bytes: int = MOST_BYTES
) -> list[Path]:
    """Write the weights of a prepared model as `from_pretrained` reads them; a collective of all ranks.

    Rank 0 writes `model.safetensors`, or several files with their index, which replace those that are there.
    One unit of parameters is gathered at a time, and no rank holds more, whatever tier they are in. What has
    several names is written under the first of them.

    Args:
        model: what [`prepare`][zero_ext.prepare] returned.
        folder: is made if it is missing.
        max_file_bytes: bytes of tensors in a file, which holds one tensor at least.

    Returns:
        The files, on rank 0; none on the others.

    Raises:
        ValueError: `max_file_bytes` is no number of bytes, or `model` is not prepared, has a dtype that
            safetensors lack, or is spread over pipeline or tensor parallel ranks.
        CollectiveError: on every rank, if writing fails.

    Examples:
        >>> model, _ = zero_ext.prepare(torch.nn.Linear(4, 2), None, {"stage": 3})
        >>> [path.name for path in zero_ext.save_weights(model, "weights")]
        ['model.safetensors']
    """
    writes = engine_of(model).rank == 0
    return write_full_weights(model, Path(folder), max_file_bytes, writes)


def _unchanged(name: str, value: torch.Tensor) -> Mapping[str, torch.Tensor]:
    return {name: value}


def write_full_weights(
    model: nn.Module,
    folder: Path,
    most_bytes: int,
    writes: bool,
    convert: Convert = _unchanged,
    ignored: Collection[str] = (),
) -> list[Path]:
    """Write the weights of ``model``, but those ``ignored``, as ``convert`` makes them, on ranks where
    ``writes``; a collective. See :func:`save_weights`."""
    engine = engine_of(model)
    if type(most_bytes) is not int or most_bytes < 1:
        raise ValueError(f"max_file_bytes: expected a number from 1, got {most_bytes!r}. Pass such a number.")
    full = checkpoint_sources(engine).full
    if isinstance(full, ModelParallelState):
        raise ValueError(
            "model: expected one that every rank has in full or in shards, got a part of one that pipeline "
            "or tensor parallel ranks have. Save a checkpoint, and write its weights with zero-ext export."
        )
    engine.finish_updates()
    plan = _Plan.of(engine, convert, frozenset(ignored))
    values = _Values(plan, full_values(engine, [each.source for each in plan.parameters]))

    def write() -> list[Path]:
        try:
            if writes and folder.exists() and not folder.is_dir():
                raise ValueError(f"{folder}: expected a folder, got a file. Pass another path.")
            return (
                write_weights(values.lazy(), folder.absolute(), most_bytes, replaces=True) if writes else []
            )
        finally:
            values.finish()  # other ranks wait for this one in every gather

    return raise_on_all_ranks(full.everyone, write, f"writing weights to {folder}")


class _Saved(NamedTuple):
    """A parameter, and the tensors of the files that are made of it, on the meta device."""

    source: FullSource
    made: Mapping[str, torch.Tensor]


class _Plan(NamedTuple):
    """The tensors in the order of writing: readers of safetensors want the widest elements first."""

    parameters: list[_Saved]
    buffers: Mapping[str, torch.Tensor]
    convert: Convert

    @classmethod
    def of(cls, engine: Engine, convert: Convert, ignored: frozenset[str]) -> _Plan:
        saved = []
        for source in full_sources(engine):
            if not ignored.issuperset(source.names):
                name = next(each for each in source.names if each not in ignored)
                meta = torch.empty(source.shape, dtype=source.parameters[0].dtype, device="meta")
                saved.append(_Saved(source._replace(names=(name,)), convert(name, meta)))
        saved = [each for each in saved if each.made]
        saved.sort(key=lambda each: -max(one.dtype.itemsize for one in each.made.values()))
        buffers: dict[str, torch.Tensor] = {}
        for name, buffer in first_buffers(engine.model).items():
            if name not in ignored:
                buffers |= convert(name, buffer.detach())
        for each in (*(one.made for one in saved), buffers):
            for name, value in each.items():
                if value.dtype not in SAFETENSORS_CODES:
                    raise ValueError(
                        f"{name}: expected a dtype of safetensors, got {value.dtype}. Save a checkpoint."
                    )
        return cls(saved, buffers, convert)


class _Values:
    """The values of a plan, to be taken in its order."""

    def __init__(self, plan: _Plan, values: Iterator[torch.Tensor]) -> None:
        self._plan, self._values = plan, values
        self._next = 0
        self._made: Mapping[str, torch.Tensor] = {}

    def lazy(self) -> dict[str, torch.Tensor | LazyTensor]:
        """Return the tensors of the files; those of parameters have their values once, in this order."""
        found: dict[str, torch.Tensor | LazyTensor] = {}
        for number, saved in enumerate(self._plan.parameters):
            for name, meta in saved.made.items():
                found[name] = LazyTensor(meta.shape, meta.dtype, partial(self._chunks, number, name))
        return {**found, **self._plan.buffers}

    def _chunks(self, number: int, name: str) -> Iterator[torch.Tensor]:
        while self._next <= number:
            self._made = {}
            source = self._plan.parameters[self._next].source
            self._made = self._plan.convert(source.names[0], next(self._values))
            self._next += 1
        value = self._made[name]
        for chunk in value.reshape(-1).split(CHUNK_BYTES // value.element_size()):
            yield chunk.cpu()

    def finish(self) -> None:
        """Take part in the gathers that are left."""
        self._made = {}
        for _ in self._values:
            pass
