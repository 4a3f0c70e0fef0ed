"""Hugging Face's safetensors into a prepared model: every rank reads its own shards, a chunk at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from zero_ext.checkpoint.chunk_reader import Chunk, ChunkReader
from zero_ext.checkpoint.files import CheckpointError
from zero_ext.checkpoint.format.state_source import MASTER
from zero_ext.checkpoint.format.tensor_files import (
    StoredTensor,
    WeightFiles,
    converts,
    find_weights,
    is_logical_order,
)
from zero_ext.checkpoint.load_plan import BufferCopies, Fill, read_fills, refuse_misfits
from zero_ext.checkpoint.rank_consensus import RankConsensus
from zero_ext.checkpoint.save_session import session_of
from zero_ext.checkpoint.state_slices import CheckpointSlice, DeviceStaging
from zero_ext.config.config_errors import clause_of
from zero_ext.zero.api.engine_lookup import checkpoint_sources, engine_of
from zero_ext.zero.engine import Engine

Rename = Callable[[str], str] | Mapping[str, str]
# A file has no checksums whose size would say how much to read as one.
CHUNK_BYTES = 4 << 20
_UNCHANGED = "Nothing of the model was changed."
_DAMAGE = "weights from safetensors were loaded only in part"
_REMEDY = f"The {_DAMAGE}. Load them all, or a checkpoint."


def load_safetensors(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    rename: Rename | None = None,
) -> tuple[list[str], list[str]]:
    """Load Hugging Face weights into a prepared model of any stage, tiers and ranks; a collective.

    Every rank reads the bytes of its own shards and nothing else, in chunks, straight into their tiers, so no
    rank ever holds the full model. After `prepare(model_on_meta, init="skip")` it never did. Floating-point
    tensors are converted. Master weights get the values of the file, in float32. Optimizer state stays as it
    is, gradients are dropped. A tensor of a parameter that is not row-major in memory is read in full by
    every rank that has a slice of it, one at a time.

    Args:
        model: what [`prepare`][zero_ext.prepare] returned.
        path: a folder as `save_pretrained` writes it (`model.safetensors`, or several files with
            `model.safetensors.index.json`), an index, or a single file; readable on every rank.
        strict: raise for tensors that are missing or that the model does not have, instead of leaving them.
            A tied parameter may come under any of its names; the last one counts, as in torch.
        rename: from names in the files to names in the model: a mapping (others stay) or a function.

    Returns:
        The missing and the unexpected names.

    Raises:
        ValueError: names, shapes or dtypes do not fit; nothing was changed.
        CheckpointError: a file is missing, damaged or hostile; nothing was changed. Or reading or storing
            failed later: the model then refuses to go on until all weights or a checkpoint are loaded.

    Examples:
        >>> from safetensors.torch import save_file
        >>> save_file({"weight": torch.eye(2), "bias": torch.ones(2)}, "model.safetensors")
        >>> with torch.device("meta"):
        ...     model = torch.nn.Linear(2, 2)
        >>> model, _ = zero_ext.prepare(model, None, {"stage": 3}, init="skip", device="cpu")
        >>> zero_ext.load_safetensors(model, "model.safetensors")
        ([], [])
        >>> zero_ext.full_state_dict(model)["bias"]
        tensor([1., 1.])
    """
    engine = engine_of(model)
    state = checkpoint_sources(engine).own
    session = session_of(state)
    if engine.updates.in_progress:
        engine.finish_updates()
    consensus = RankConsensus(
        state.rank, state.world_size, session.group_of(state), f"loading weights from {os.fspath(path)}"
    )
    plans: list[WeightsPlan] = []

    def plan() -> str:
        session.finish_previous()
        if engine.optimizer_step.damage not in (None, _DAMAGE):
            raise RuntimeError(
                f"optimizer: its state is damaged: {clause_of(engine.optimizer_step.damage)}. Load a "
                "checkpoint first."
            )
        files = find_weights(path)
        plans.append(plan_weights(engine, files, strict, rename))
        return files.digest()

    if len(set(consensus.stage(plan, _UNCHANGED))) > 1:
        raise CheckpointError(
            f"{os.fspath(path)}: the ranks see different files there. Copy the same files to all machines. "
            f"{_UNCHANGED}"
        )
    (planned,) = plans
    consensus.stage(engine.follow_writes, _UNCHANGED)
    before, engine.optimizer_step.damage = engine.optimizer_step.damage, _DAMAGE
    consensus.stage(planned.fill, _REMEDY)
    state.finish_load()
    engine.optimizer_step.damage = before if planned.missing else None
    consensus.raise_interrupt()
    return planned.missing, planned.unexpected


@dataclass(frozen=True)
class WeightsPlan:
    """The plan of this rank: the slices of every parameter and buffer, by its first name in the model.

    ``keys`` are the names in the files, ``orders`` shape and stride in the model.
    """

    files: WeightFiles
    keys: Mapping[str, str]
    orders: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    targets: Mapping[str, list[CheckpointSlice]]
    buffers: BufferCopies
    missing: list[str]
    unexpected: list[str]

    def fill(self) -> None:
        """Read everything to where it belongs."""
        staging = DeviceStaging()
        with ChunkReader(self.files.paths) as reader:
            straight = [
                fill
                for name, targets in self.targets.items()
                if is_logical_order(*self.orders[name])
                for target in targets
                for fill in self._fills(name, target, target.start)
            ]
            read_fills(reader, sorted(straight, key=lambda fill: fill.chunk[:2]), staging)
            for name, targets in self.targets.items():
                if targets and not is_logical_order(*self.orders[name]):
                    self._fill_reordered(reader, name, targets, staging)
        self.buffers.finish()

    def _fill_reordered(
        self, reader: ChunkReader, name: str, targets: Sequence[CheckpointSlice], staging: DeviceStaging
    ) -> None:
        shape, stride = self.orders[name]
        _, (entry, _) = self.files.tensors[self.keys[name]]
        values = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        full = CheckpointSlice("weights", name, 0, values.view(-1))
        read_fills(reader, list(self._fills(name, full, 0)), staging)
        ordered = torch.empty_strided(shape, stride, dtype=values.dtype, device="cpu").copy_(values)
        flat = ordered.as_strided((values.numel(),), (1,))
        for target in targets:
            target.put(0, flat[target.start : target.start + target.numel], staging)

    def _fills(self, name: str, target: CheckpointSlice, start: int) -> Iterator[Fill]:
        """Yield what to read for ``target``, which begins at element ``start`` of the tensor ``name``."""
        file, (entry, offset) = self.files.tensors[self.keys[name]]
        width = entry.dtype.itemsize
        step = CHUNK_BYTES // width
        for begin in range(0, target.numel, step):
            end = min(begin + step, target.numel)
            chunk = Chunk(
                file, offset + (start + begin) * width, (end - begin) * width, None, repr(entry.key)
            )
            yield Fill(chunk, entry.dtype, 0, target, begin, end)


def plan_weights(engine: Engine, files: WeightFiles, strict: bool, rename: Rename | None) -> WeightsPlan:
    """Return the plan for the model of ``engine``. ``ValueError`` names what is missing or unexpected, if
    ``strict``, or does not fit, always."""
    key_of = _renamed(files, rename)
    names = _names(engine)
    specs = _tensor_specs(engine, names)
    keys: dict[str, str] = {}
    problems: list[str] = []
    for alias, name in names.items():
        if alias in key_of:
            keys[name] = key_of[alias]  # the last of several names counts, as it does for torch
            problems += misfits(alias, *specs[name][::2], files.tensors[key_of[alias]][1])
    refuse_misfits("weights: they do not fit the model", problems, "Pass the weights of this model.")
    missing = [name for name in specs if name not in keys]
    unexpected = [alias for alias in key_of if alias not in names]
    if strict and (missing or unexpected):
        raise ValueError(
            f"weights: they lack {missing} and have {unexpected}, which the model does not. Pass 'rename' if "
            "they have other names there, or strict=False to leave them."
        )
    targets: dict[str, list[CheckpointSlice]] = {name: [] for name in keys}
    own = checkpoint_sources(engine).own
    for needed in own.load_slices():
        if needed.kind == MASTER and needed.name in targets:
            targets[needed.name].append(CheckpointSlice.of(needed))
    buffers = BufferCopies()
    for name, buffer in own.buffers().items():
        if name in targets:
            targets[name].append(buffers.target(name, buffer))
    orders = {name: (spec.shape, spec.stride) for name, spec in specs.items()}
    return WeightsPlan(files, keys, orders, targets, buffers, missing, unexpected)


def misfits(name: str, shape: Sequence[int], dtype: torch.dtype, stored: StoredTensor) -> list[str]:
    """Return what keeps a stored tensor from filling the one called ``name`` in the model."""
    problems = []
    if stored.entry.shape != tuple(shape):
        problems.append(f"{name!r}: expected shape {tuple(shape)}, got {stored.entry.shape}")
    if not converts(stored.entry.dtype, dtype):
        problems.append(f"{name!r}: expected {dtype}, got {stored.entry.dtype}")
    return problems


class _TensorSpec(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def _tensor_specs(engine: Engine, names: Mapping[str, str]) -> dict[str, _TensorSpec]:
    """Parameters, tiles put together, and buffers, each under its first name."""
    own = checkpoint_sources(engine).own
    found = {
        name: _TensorSpec(entry.shape, entry.stride, getattr(torch, entry.dtype))
        for name, entry in own.parameter_table().items()
    }
    for name, buffer in own.buffers().items():
        if names[name] == name:
            stride = torch.empty(buffer.shape, device="meta").stride()
            found[name] = _TensorSpec(tuple(buffer.shape), stride, buffer.dtype)
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
