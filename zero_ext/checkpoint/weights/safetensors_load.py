"""Hugging Face's safetensors into a prepared model: every rank reads its own shards, a chunk at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from zero_ext.checkpoint.files.checkpoint_error import CheckpointError
from zero_ext.checkpoint.format.memory_order import is_logical_order
from zero_ext.checkpoint.rank_consensus import RankConsensus
from zero_ext.checkpoint.save_session import session_of
from zero_ext.checkpoint.transfer.chunk_reader import Chunk, ChunkReader
from zero_ext.checkpoint.transfer.device_staging import DeviceStaging
from zero_ext.checkpoint.transfer.read_plan import Fill, FillTarget
from zero_ext.checkpoint.weights.safetensors_files import find_weights
from zero_ext.checkpoint.weights.safetensors_plan import Rename, WeightsPlan, plan_weights
from zero_ext.config.schema.config_errors import clause_of
from zero_ext.zero.api.engine_lookup import checkpoint_sources, engine_of

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
    consensus.stage(lambda: _fill(planned), _REMEDY)
    state.finish_load()
    engine.optimizer_step.damage = before if planned.missing else None
    consensus.raise_interrupt()
    return planned.missing, planned.unexpected


def _fill(plan: WeightsPlan) -> None:
    staging = DeviceStaging()
    with ChunkReader(plan.files.paths) as reader:
        straight = [
            fill
            for name, targets in plan.targets.items()
            if is_logical_order(*plan.orders[name])
            for target in targets
            for fill in _fills(plan, name, target, target.start)
        ]
        _read(reader, sorted(straight, key=lambda fill: fill.chunk[:2]), staging)
        for name, targets in plan.targets.items():
            if targets and not is_logical_order(*plan.orders[name]):
                _fill_reordered(reader, plan, name, targets, staging)
    with torch.no_grad():
        for buffer, copy in plan.buffers:
            buffer.copy_(copy.view(buffer.shape))


def _fill_reordered(
    reader: ChunkReader, plan: WeightsPlan, name: str, targets: Sequence[FillTarget], staging: DeviceStaging
) -> None:
    shape, stride = plan.orders[name]
    _, tensor = plan.stored(name)
    values = torch.empty(tensor.entry.shape, dtype=tensor.entry.dtype, device="cpu")
    _read(reader, list(_fills(plan, name, FillTarget("weights", name, 0, values.view(-1)), 0)), staging)
    ordered = torch.empty_strided(shape, stride, dtype=values.dtype, device="cpu").copy_(values)
    flat = ordered.as_strided((values.numel(),), (1,))
    for target in targets:
        target.put(0, flat[target.start : target.start + target.numel], staging)


def _fills(plan: WeightsPlan, name: str, target: FillTarget, start: int) -> Iterator[Fill]:
    """Yield what to read for ``target``, which begins at element ``start`` of the stored tensor ``name``."""
    file, (entry, offset) = plan.stored(name)
    step = CHUNK_BYTES // entry.dtype.itemsize
    for begin in range(0, target.numel, step):
        end = min(begin + step, target.numel)
        at, size = offset + (start + begin) * entry.dtype.itemsize, (end - begin) * entry.dtype.itemsize
        yield Fill(Chunk(file, at, size, None, repr(entry.key)), entry.dtype, 0, target, begin, end)


def _read(reader: ChunkReader, fills: Sequence[Fill], staging: DeviceStaging) -> None:
    for chunk_read in reader.read([fill.read() for fill in fills]):
        fills[chunk_read.request].write(chunk_read.data, staging)
