"""Weights from files into a prepared model: every rank reads its own shards, a chunk at a time."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zero_ext.checkpoint.files import CheckpointError
from zero_ext.checkpoint.format.state_source import MASTER, StateSource
from zero_ext.checkpoint.format.tensor_files import converts, memory_order, row_major
from zero_ext.checkpoint.load_plan import BufferCopies, refuse_misfits
from zero_ext.checkpoint.rank_consensus import RankConsensus
from zero_ext.checkpoint.save_session import session_of
from zero_ext.checkpoint.state_slices import CheckpointSlice, DeviceStaging
from zero_ext.checkpoint.weights.weight_sources import StoredWeight, WeightSource
from zero_ext.config.config_errors import clause_of
from zero_ext.zero.api.engine_lookup import checkpoint_sources, engine_of

Rename = Callable[[str], str | None] | Mapping[str, str | None]
_MOST_TRIED = 8  # of the missing names, behind every prefix
_UNCHANGED = "Nothing of the model was changed."
_DAMAGE = "weights were loaded only in part"
_REMEDY = f"The {_DAMAGE}. Load them all, or a checkpoint."


def fill_weights(
    model: nn.Module, name: str, open_source: Callable[[], WeightSource], strict: bool, rename: Rename | None
) -> tuple[list[str], list[str]]:
    """Load the weights that ``open_source`` opens on every rank, those of ``name``, into a prepared model; a
    collective. Returns and raises what :func:`zero_ext.load_weights` does."""
    engine = engine_of(model)
    if engine.updates.in_progress:
        engine.finish_updates()
    state = checkpoint_sources(engine).of_all_ranks()
    session = session_of(state)
    consensus = RankConsensus(
        state.rank, state.world_size, session.group_of(state), f"loading weights from {name}"
    )
    plans: list[WeightsPlan] = []

    def plan() -> str:
        session.finish_previous()
        if engine.optimizer_step.damage not in (None, _DAMAGE):
            raise RuntimeError(
                f"optimizer: its state is damaged: {clause_of(engine.optimizer_step.damage)}. Load a "
                "checkpoint first."
            )
        engine.updates.refuse_drift("a load of weights alone")
        source = open_source()
        plans.append(plan_weights(state, source, strict, rename))
        return f"{source.digest()} {plans[0].digest()}"

    if len(set(consensus.stage(plan, _UNCHANGED))) > 1:
        raise CheckpointError(
            f"{name}: the ranks see different files there, or were given different arguments. Copy the same "
            f"files to all machines, and pass the same path, step and rename on all ranks. {_UNCHANGED}"
        )
    (planned,) = plans
    consensus.stage(lambda: planned.verify(state.rank, state.world_size), _UNCHANGED)
    consensus.stage(engine.follow_writes, _UNCHANGED)
    before, engine.optimizer_step.damage = engine.optimizer_step.damage, _DAMAGE
    consensus.stage(planned.fill, _REMEDY)
    state.finish_load(optimizer=False)
    engine.optimizer_step.damage = before if planned.missing else None
    consensus.raise_interrupt()
    return planned.missing, planned.unexpected


@dataclass(frozen=True)
class WeightsPlan:
    """The plan of this rank: the slices of every parameter and buffer, by its first name in the model.

    ``keys`` are the names in the files, ``orders`` shape and stride in the model.
    """

    source: WeightSource
    keys: Mapping[str, str]
    orders: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    targets: Mapping[str, list[CheckpointSlice]]
    buffers: BufferCopies
    missing: list[str]
    unexpected: list[str]

    def digest(self) -> str:
        """Return a hash of what is read to where."""
        text = repr((sorted(self.keys.items()), self.missing, self.unexpected))
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    def verify(self, rank: int, world_size: int) -> None:
        """Compare what is to be read with the checksums that the files have."""
        wanted = {}
        for name, targets in self.targets.items():
            key = self.keys[name]
            if targets and not self._is_in_order(name):
                shape, _, dtype = self.source.tensors[key]
                full = torch.empty(math.prod(shape), dtype=dtype, device="meta")
                targets = [CheckpointSlice("weights", name, 0, full)]
            wanted[key] = targets
        self.source.verify(wanted, rank, world_size)

    def fill(self) -> None:
        """Read everything to where it belongs."""
        staging = DeviceStaging()
        others = [name for name, targets in self.targets.items() if targets and not self._is_in_order(name)]
        wanted = {self.keys[name]: each for name, each in self.targets.items() if name not in others}
        self.source.fill(wanted, staging)
        for name in others:
            self._fill_reordered(name, staging)
        self.buffers.finish()

    def _is_in_order(self, name: str) -> bool:
        stored = self.source.tensors[self.keys[name]]
        return memory_order(*self.orders[name]) == memory_order(stored.shape, stored.stride)

    def _fill_reordered(self, name: str, staging: DeviceStaging) -> None:
        key = self.keys[name]
        shape, stride, dtype = self.source.tensors[key]
        values = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
        full = CheckpointSlice("weights", name, 0, values.as_strided((values.numel(),), (1,)))
        self.source.fill({key: [full]}, staging)
        ordered = torch.empty_strided(*self.orders[name], dtype=dtype, device="cpu").copy_(values)
        flat = ordered.as_strided((values.numel(),), (1,))
        for target in self.targets[name]:
            target.put(0, flat[target.start : target.start + target.numel], staging)


def plan_weights(
    state: StateSource, source: WeightSource, strict: bool, rename: Rename | None
) -> WeightsPlan:
    """Return the plan for the model of ``state``. ``ValueError`` names what is missing or unexpected, if
    ``strict``, or does not fit, always."""
    key_of = _renamed(source, rename)
    names = _names(state)
    specs = _tensor_specs(state, names)
    keys: dict[str, str] = {}
    problems: list[str] = []
    for alias, name in names.items():
        if alias in key_of:
            keys[name] = key = key_of[alias]  # the last of several names counts, as it does for torch
            stored = source.tensors[key]
            problems += misfits(alias, specs[name].shape, specs[name].dtype, stored.shape, stored.dtype)
    refuse_misfits("weights: they do not fit the model", problems, "Pass the weights of this model.")
    missing = [name for name in specs if name not in keys]
    unexpected = [alias for alias in key_of if alias not in names]
    if strict and (missing or unexpected):
        raise ValueError(
            f"weights: they lack {missing} and have {unexpected}, which the model does not. Pass 'rename' if "
            f"they have other names there{_prefix_hint(missing, unexpected)}, or strict=False to leave them."
        )
    targets: dict[str, list[CheckpointSlice]] = {name: [] for name in keys}
    for needed in state.load_slices():
        if needed.kind == MASTER and needed.name in targets:
            targets[needed.name].append(CheckpointSlice.of(needed))
    buffers = BufferCopies()
    for name, buffer in state.buffers().items():
        if name in targets:
            targets[name].append(buffers.target(name, buffer))
    orders = {name: (spec.shape, spec.stride) for name, spec in specs.items()}
    return WeightsPlan(source, keys, orders, targets, buffers, missing, unexpected)


def _prefix_hint(missing: list[str], unexpected: list[str]) -> str:
    """Return what to say of a prefix before the model's names, as a dict of several states gives it."""
    for name in missing[:_MOST_TRIED]:
        for key in unexpected:
            if key.endswith(f".{name}"):
                return f", which have the prefix {key.removesuffix(name)!r}"
    return ""


def misfits(
    name: str, shape: Sequence[int], dtype: torch.dtype, stored_shape: Sequence[int], stored: torch.dtype
) -> list[str]:
    """Return what keeps a stored tensor from filling the one called ``name`` in the model."""
    problems = []
    if tuple(stored_shape) != tuple(shape):
        problems.append(f"{name!r}: expected shape {tuple(shape)}, got {tuple(stored_shape)}")
    if not converts(stored, dtype):
        problems.append(f"{name!r}: expected {dtype}, got {stored}")
    return problems


def _tensor_specs(state: StateSource, names: Mapping[str, str]) -> dict[str, StoredWeight]:
    """Parameters, tiles put together, and buffers, each under its first name."""
    found = {
        name: StoredWeight(tuple(entry.shape), tuple(entry.stride), getattr(torch, entry.dtype))
        for name, entry in state.parameter_table().items()
    }
    for name, buffer in state.buffers().items():
        if names[name] == name:
            found[name] = StoredWeight(tuple(buffer.shape), row_major(buffer.shape), buffer.dtype)
    return found


def _names(state: StateSource) -> dict[str, str]:
    """Return the first name of every parameter and buffer, by each of its names."""
    found = {
        alias: name for name, entry in state.parameter_table().items() for alias in (name, *entry.aliases)
    }
    first: dict[int, str] = {}
    for name, buffer in state.buffers().items():
        found[name] = first.setdefault(id(buffer), name)
    return found


def _renamed(source: WeightSource, rename: Rename | None) -> dict[str, str]:
    """Return the tensors' names in the files by those in the model."""
    found: dict[str, str] = {}
    for key in source.tensors:
        name = key if rename is None else rename(key) if callable(rename) else rename.get(key, key)
        if name is None:
            continue
        if not isinstance(name, str):
            raise TypeError(
                f"rename: expected a name or None for {key!r}, got {name!r}. Let it give one of them."
            )
        if name in found:
            raise ValueError(
                f"rename: expected a name of its own for each tensor, got {name!r} for both {found[name]!r} "
                f"and {key!r}. Give one of them another name."
            )
        found[name] = key
    return found
