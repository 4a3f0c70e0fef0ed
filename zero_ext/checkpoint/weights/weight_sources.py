"""Weights in files of two formats, as a load into a prepared model reads them: a slice at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from zero_ext.checkpoint.chunk_reader import Chunk, ChunkReader, ChunkRequest, shard_paths
from zero_ext.checkpoint.format.manifest import (
    ParameterRecord,
    check_manifest,
    read_manifest,
    slices_by_tensor,
)
from zero_ext.checkpoint.format.tensor_files import WeightFiles, dtype_named, row_major
from zero_ext.checkpoint.inspection import checkpoint_path
from zero_ext.checkpoint.load_plan import Fill, plan_fills, read_fills
from zero_ext.checkpoint.state_slices import CheckpointSlice, DeviceStaging

# A safetensors file has no checksums whose size would say how much to read as one.
CHUNK_BYTES = 4 << 20

Wanted = Mapping[str, Sequence[CheckpointSlice]]
"""Slices of stored tensors to be filled, by the tensor's name; they count elements as these are stored."""


class StoredWeight(NamedTuple):
    """A tensor of the files; its elements are stored in the memory order of ``shape`` and ``stride``."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class WeightSource(Protocol):
    """Files of weights with tables that have been checked."""

    @property
    def tensors(self) -> Mapping[str, StoredWeight]:
        """All tensors by name, a tied one by each of its names."""

    def digest(self) -> str:
        """Return a hash of the tables, by which ranks check that they read the same files."""

    def verify(self, wanted: Wanted, rank: int, world_size: int) -> None:
        """Raise ``CheckpointError`` if bytes of ``wanted`` are damaged, as far as the files have checksums.
        What all ranks need, each verifies a part of."""

    def fill(self, wanted: Wanted, staging: DeviceStaging) -> None:
        """Read all of ``wanted`` to where it belongs."""


class SafetensorsWeights:
    """The content of safetensors files, which have no checksums."""

    def __init__(self, files: WeightFiles) -> None:
        self._files = files

    @cached_property
    def tensors(self) -> Mapping[str, StoredWeight]:
        """See :class:`WeightSource`."""
        return {
            key: StoredWeight(tensor.entry.shape, row_major(tensor.entry.shape), tensor.entry.dtype)
            for key, (_, tensor) in self._files.tensors.items()
        }

    def digest(self) -> str:
        """See :class:`WeightSource`."""
        return self._files.digest()

    def verify(self, wanted: Wanted, rank: int, world_size: int) -> None:
        """See :class:`WeightSource`."""

    def fill(self, wanted: Wanted, staging: DeviceStaging) -> None:
        """See :class:`WeightSource`."""
        fills = [fill for key, slices in wanted.items() for each in slices for fill in self._fills(key, each)]
        with ChunkReader(self._files.paths) as reader:
            read_fills(reader, sorted(fills, key=lambda fill: fill.chunk[:2]), staging)

    def _fills(self, key: str, target: CheckpointSlice) -> Iterator[Fill]:
        file, (entry, offset) = self._files.tensors[key]
        width = entry.dtype.itemsize
        step = CHUNK_BYTES // width
        for begin in range(0, target.numel, step):
            end = min(begin + step, target.numel)
            where = offset + (target.start + begin) * width
            chunk = Chunk(file, where, (end - begin) * width, None, repr(key))
            yield Fill(chunk, entry.dtype, 0, target, begin, end)


class CheckpointWeights:
    """The weights and buffers of a checkpoint of ``directory``: its ``step``, by default the latest.

    ``CheckpointError`` says what is wrong with it.
    """

    def __init__(self, directory: Path, step: int | None) -> None:
        self._path = checkpoint_path(directory, step)
        self._manifest, self._checksum = read_manifest(self._path)
        check_manifest(self._manifest, self._path)
        self._stored: dict[str, tuple[str, str]] = {}  # kind and first name of what has a name
        self.tensors: dict[str, StoredWeight] = {}
        records = slices_by_tensor(self._manifest)
        for kind, name, entry in self._manifest.tensors():
            shape, stride, names = tuple(entry.shape), row_major(entry.shape), [name]
            if isinstance(entry, ParameterRecord):
                stride, names = tuple(entry.stride), [name, *entry.aliases]
            dtype = dtype_named(records[kind, name][0].dtype if (kind, name) in records else entry.dtype)
            self._stored.update(dict.fromkeys(names, (kind, name)))
            self.tensors.update(dict.fromkeys(names, StoredWeight(shape, stride, dtype)))

    def digest(self) -> str:
        """See :class:`WeightSource`."""
        return f"{self._path.name} {self._checksum}"

    def verify(self, wanted: Wanted, rank: int, world_size: int) -> None:
        """See :class:`WeightSource`."""
        chunks = sorted({fill.chunk for fill in self._fills(wanted)})
        with ChunkReader(shard_paths(self._path, self._manifest)) as reader:
            for _ in reader.verified([ChunkRequest(chunk, None) for chunk in chunks]):
                pass

    def fill(self, wanted: Wanted, staging: DeviceStaging) -> None:
        """See :class:`WeightSource`."""
        with ChunkReader(shard_paths(self._path, self._manifest)) as reader:
            read_fills(reader, self._fills(wanted), staging)

    def _fills(self, wanted: Wanted) -> list[Fill]:
        targets = []
        for key, slices in wanted.items():
            kind, name = self._stored[key]
            targets += [each._replace(kind=kind, name=name) for each in slices if each.numel]
        return plan_fills(self._manifest, targets)
