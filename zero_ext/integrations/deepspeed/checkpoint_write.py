"""Writes what was read of a DeepSpeed checkpoint in zero_ext's format, committed by one rename."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from zero_ext.checkpoint import CheckpointError
from zero_ext.checkpoint.directory import CheckpointDirectory
from zero_ext.checkpoint.dtypes import dtype_name
from zero_ext.checkpoint.manifest import (
    CHUNK_BYTES,
    FORMAT,
    MANIFEST_NAME,
    VERSION,
    BufferRecord,
    FileRecord,
    Manifest,
    ParameterRecord,
    PieceRecord,
    encode_manifest,
)
from zero_ext.checkpoint.manifest_check import check_cover, check_disjoint_bytes
from zero_ext.checkpoint.shard_file import owned_pieces, write_shard
from zero_ext.checkpoint.source import MASTER
from zero_ext.checkpoint.storage import Storage
from zero_ext.integrations.deepspeed.checkpoint_layout import Fragment
from zero_ext.integrations.deepspeed.checkpoint_source import DeepSpeedCheckpoint
from zero_ext.zero.state import ShardPiece

_LOCK_SECONDS = 60.0


def weights_manifest(checkpoint: DeepSpeedCheckpoint, step: int) -> Manifest:
    """The manifest of parameters and buffers, without files and pieces and with nothing beside the
    tensors."""
    parameters = {
        name: ParameterRecord(
            shape=list(entry.shape),
            stride=list(torch.empty(entry.shape, device="meta").stride()),
            dtype=dtype_name(entry.dtype),
            aliases=list(checkpoint.aliases.get(name, ())),
            trainable=name in checkpoint.trained,
        )
        for name, entry in checkpoint.parameters.items()
    }
    buffers = {
        name: BufferRecord(shape=list(buffer.shape), dtype=dtype_name(buffer.dtype))
        for name, buffer in checkpoint.buffers.items()
    }
    return Manifest(
        format=FORMAT,
        version=VERSION,
        step=step,
        world_size=checkpoint.world_size,
        mesh={"dp": checkpoint.world_size},
        chunk_bytes=CHUNK_BYTES,
        parameters=parameters,
        buffers=buffers,
        files=[],
        pieces=[],
        scalar_state={},
        client_state=None,
        extra={},
    )


def write_checkpoint(
    checkpoint: DeepSpeedCheckpoint,
    manifest: Manifest,
    root: Path,
    *,
    moments: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Manifest:
    """Writes ``root/step-...`` of ``manifest``, a file for each rank of ``checkpoint``, and returns the
    manifest with its files and pieces. Without ``moments`` the optimizer's state stays behind.

    Nothing remains of it after an error; OSError and CheckpointError name the file.
    """
    directory, storage = CheckpointDirectory(root), Storage()
    storage.make_directory(root)
    with directory.locked(_LOCK_SECONDS):
        directory.clean(storage)
        folder = directory.saving(manifest.step)
        try:
            storage.make_directory(folder)
            files: list[FileRecord] = []
            records: list[PieceRecord] = []
            for rank in range(checkpoint.world_size):
                owned = owned_pieces(
                    _pieces(checkpoint, rank, moments), checkpoint.buffers if rank == 0 else {}
                )
                file, written = write_shard(storage, folder, rank, owned)
                files.append(file)
                records += written
                if progress is not None:
                    progress(rank + 1, checkpoint.world_size)
            whole = manifest.model_copy(update={"files": files, "pieces": records})
            _check(whole, checkpoint)
            storage.write_file(folder / MANIFEST_NAME, encode_manifest(whole))
            storage.sync_directory(folder)
            directory.commit(storage, manifest.step)
        except BaseException:
            with contextlib.suppress(OSError):
                directory.discard(storage, manifest.step)
            raise
    return whole


def _pieces(checkpoint: DeepSpeedCheckpoint, rank: int, moments: bool) -> Iterator[ShardPiece]:
    """What lies in the files of ``rank``: runs of masters, of optimizer state, of frozen parameters."""
    state = checkpoint.rank(rank)
    for name, entry in checkpoint.trained.items():
        for part in entry.fragments:
            if part.rank != rank:
                continue
            yield ShardPiece(MASTER, name, part.start, run_of(state.masters[part.flat], part))
            for kind, values in state.moments[part.flat].items() if moments else ():
                yield ShardPiece(kind, name, part.start, run_of(values, part))
    values_of = checkpoint.frozen_values(rank)
    for name, frozen in checkpoint.frozen.items():
        for part in frozen.fragments:
            if part.rank == rank:
                yield ShardPiece(MASTER, name, part.start, values_of[name])


def run_of(flat: torch.Tensor, part: Fragment) -> torch.Tensor:
    """The elements of a rank's flat tensor [n] that are ``part`` of a parameter."""
    return flat[part.begin : part.begin + part.numel]


def _check(manifest: Manifest, checkpoint: DeepSpeedCheckpoint) -> None:
    try:
        check_cover(manifest)
        check_disjoint_bytes(manifest)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.files.path}: changed while it was read: {error}") from None
