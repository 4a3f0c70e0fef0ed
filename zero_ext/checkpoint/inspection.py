"""Looking into a checkpoint without a model: its table, its sizes, and whether every byte is intact."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

from zero_ext.checkpoint.chunk_reader import (
    ChunkReader,
    ChunkRequest,
    header_chunk,
    shard_paths,
    slice_chunks,
)
from zero_ext.checkpoint.format.directory import CheckpointDirectory
from zero_ext.checkpoint.format.manifest import (
    MANIFEST_NAME,
    Manifest,
    ParameterRecord,
    check_manifest,
    read_manifest,
    slice_bytes,
)
from zero_ext.checkpoint.format.state_source import BUFFER


@dataclass(frozen=True)
class TensorSummary:
    """One parameter or buffer: its logical shape, compute dtype, tied names, and bytes stored by kind."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    aliases: tuple[str, ...]
    bytes_by_kind: dict[str, int]


@dataclass(frozen=True)
class CheckpointReport:
    """The findings of `inspect_checkpoint`.

    Attributes:
        path: folder of the checkpoint.
        step: its number.
        world_size: ranks that wrote it.
        tensors: every parameter and buffer with shape, dtype and bytes stored by kind.
        bytes_by_kind: bytes stored by kind of state.
        file_bytes: size of every file by name.
        damage: a text for each slice of a file that differs from what was written; empty if nothing does.
    """

    path: Path
    step: int
    world_size: int
    tensors: tuple[TensorSummary, ...]
    bytes_by_kind: dict[str, int]
    file_bytes: dict[str, int]
    damage: tuple[str, ...]


def checkpoint_path(directory: str | os.PathLike[str], step: int | None = None) -> Path:
    """Return the directory of one checkpoint: ``directory`` itself, else its step or latest one."""
    path = Path(directory).absolute()
    if step is None and (path / MANIFEST_NAME).exists():
        return path
    root = CheckpointDirectory(path)
    return root.committed(root.resolve(step))


def holds_checkpoints(folder: Path) -> bool:
    """Return whether ``folder`` is a checkpoint, or holds several."""
    directory = CheckpointDirectory(folder)
    steps = [directory.committed(step) for step in directory.steps()]
    return any((path / MANIFEST_NAME).exists() for path in (folder, *steps))


def open_checkpoint(directory: str | os.PathLike[str], step: int | None = None) -> tuple[Path, Manifest]:
    """Path and checked manifest of a checkpoint; CheckpointError says what is wrong with it."""
    path = checkpoint_path(directory, step)
    manifest, _ = read_manifest(path)
    check_manifest(manifest, path)
    return path, manifest


def inspect_checkpoint(directory: str | os.PathLike[str], *, step: int | None = None) -> CheckpointReport:
    """Read the table of a checkpoint and every byte of its files, without a model.

    Args:
        directory: one checkpoint, or a folder of several.
        step: number of the checkpoint; default the latest.

    Returns:
        The report. Bytes that do not have their checksum are listed in it.

    Raises:
        CheckpointError: there is no checkpoint, or its manifest or the size of a file is wrong.

    Examples:
        >>> from zero_ext.checkpoint import inspect_checkpoint
        >>> model, _ = zero_ext.prepare(torch.nn.Linear(4, 2), None, {"stage": 3})
        >>> handle = zero_ext.save_checkpoint("checkpoints", model)
        >>> report = inspect_checkpoint("checkpoints")
        >>> report.world_size, len(report.tensors), report.damage
        (1, 2, ())
    """
    path, manifest = open_checkpoint(directory, step)
    stored: dict[tuple[bool, str], Counter[str]] = defaultdict(Counter)
    totals: Counter[str] = Counter()
    for record in manifest.slices:
        totals[record.kind] += slice_bytes(record)
        stored[record.kind == BUFFER, record.name][record.kind] += slice_bytes(record)
    tensors = []
    for kind, name, entry in manifest.tensors():
        aliases = tuple(entry.aliases) if isinstance(entry, ParameterRecord) else ()
        sizes = dict(stored[kind == BUFFER, name])
        tensors.append(TensorSummary(name, tuple(entry.shape), entry.dtype, aliases, sizes))
    return CheckpointReport(
        path=path,
        step=manifest.step,
        world_size=manifest.world_size,
        tensors=tuple(tensors),
        bytes_by_kind=dict(totals),
        file_bytes={entry.name: entry.bytes for entry in manifest.files},
        damage=tuple(_damage(path, manifest)),
    )


def _damage(path: Path, manifest: Manifest) -> list[str]:
    chunks = [header_chunk(manifest, file) for file in range(len(manifest.files))]
    for record in manifest.slices:
        chunks.extend(slice_chunks(record, manifest.chunk_bytes, 0, len(record.crc32c)))
    chunks.sort()
    with ChunkReader(shard_paths(path, manifest)) as reader:
        return [
            reader.damage(chunks[number], found)
            for number, _, found in reader.read([ChunkRequest(chunk, None) for chunk in chunks])
            if found != chunks[number].crc32c
        ]
