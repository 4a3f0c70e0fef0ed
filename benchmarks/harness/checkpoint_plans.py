"""Plans of a checkpoint's save and load on one rank, and the manifest that N ranks would have written."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from zero_ext.checkpoint import saving
from zero_ext.checkpoint.api import random_states
from zero_ext.checkpoint.format.manifest import (
    CHUNK_BYTES,
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    SliceRecord,
    check_manifest,
    encode_manifest,
    read_manifest,
    shard_file_name,
)
from zero_ext.checkpoint.format.state_source import BUFFER
from zero_ext.checkpoint.format.tensor_files import dtype_name
from zero_ext.checkpoint.load_plan import LoadPlan, plan_load
from zero_ext.checkpoint.shard_file import saved_slices
from zero_ext.checkpoint.state_slices import CheckpointSlice
from zero_ext.zero.api.engine_lookup import checkpoint_sources

HEADER_BYTES = 8


class CheckpointPlans:
    """Plans as :func:`zero_ext.save_checkpoint` and :func:`zero_ext.load_checkpoint` make them on `engine`.

    No value is written or read. What the ranks agree on over connections of their own is left out.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._source = checkpoint_sources(engine).of_all_ranks(True)

    def plan_save(self) -> tuple[Manifest, list[CheckpointSlice]]:
        """Return the manifest without its slices, random states of all ranks included, and this rank's
        slices; a collective."""
        everyone = self._engine.collectives
        extra = {"random": random_states(everyone, torch.get_rng_state(), "random states")}
        buffers = self._source.buffers()
        manifest = saving._describe(self._source, buffers, 0, None, extra)
        own = buffers if self._source.rank == 0 else {}
        return manifest, saved_slices(self._source.save_slices(), own)

    def write_manifest(self, folder: Path) -> int:
        """Write the manifest of a checkpoint that all ranks saved, with empty files of the right sizes, and
        return its bytes."""
        manifest = self._full_manifest()
        for file in manifest.files:
            path = folder / file.name
            path.touch()
            os.truncate(path, file.bytes)
        data = encode_manifest(manifest)
        (folder / MANIFEST_NAME).write_bytes(data)
        return len(data)

    def plan_load(self, folder: Path) -> LoadPlan:
        """Read and check the manifest, and plan this rank's reads."""
        manifest, _ = read_manifest(folder)
        check_manifest(manifest, folder)
        return plan_load(self._source, manifest, folder, optimizer=True)

    def _full_manifest(self) -> Manifest:
        manifest, own = self.plan_save()
        dtypes = {(each.kind, each.name): each.values.dtype for each in own if each.kind != BUFFER}
        kinds: dict[str, list[str]] = defaultdict(list)
        for kind, name in dtypes:
            kinds[name].append(kind)
        some = next(iter(kinds.values()))
        world_size, ends = self._source.world_size, [HEADER_BYTES] * self._source.world_size
        slices: list[SliceRecord] = []

        def add(rank: int, kind: str, name: str, start: int, numel: int, dtype: torch.dtype) -> None:
            nbytes = numel * dtype.itemsize
            slices.append(
                SliceRecord.model_construct(
                    file=rank,
                    kind=kind,
                    name=name,
                    start=start,
                    numel=numel,
                    dtype=dtype_name(dtype),
                    offset=ends[rank],
                    crc32c=[0xFFFFFFF0] * -(-nbytes // CHUNK_BYTES),
                    shape=None,
                )
            )
            ends[rank] += nbytes

        for unit in self._engine.units:
            for rank in range(world_size):
                for segment in unit.layout.segments(*unit.layout.shard_range(rank)):
                    for kind in some:
                        numel = segment.end - segment.begin
                        add(rank, kind, segment.name, segment.start, numel, torch.float32)
        for name, buffer in self._source.buffers().items():
            add(0, BUFFER, name, 0, math.prod(buffer.shape), buffer.dtype)
        files = [
            FileRecord.model_construct(
                name=shard_file_name(rank), bytes=end, header_bytes=HEADER_BYTES, header_crc32c=0
            )
            for rank, end in enumerate(ends)
        ]
        return manifest.model_copy(update={"files": files, "slices": slices})
