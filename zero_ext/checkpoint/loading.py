"""Loading: everything is checked and every byte verified before any live state is touched."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zero_ext.checkpoint.files.checkpoint_error import CheckpointError
from zero_ext.checkpoint.format.directory import CheckpointDirectory
from zero_ext.checkpoint.format.manifest import read_manifest
from zero_ext.checkpoint.format.manifest_check import check_manifest
from zero_ext.checkpoint.format.state_source import (
    BUFFER,
    MASTER,
    OptimizerlessStateSource,
    SelectiveStateSource,
    StateSource,
)
from zero_ext.checkpoint.load_plan import LoadPlan, check_requests, plan_load
from zero_ext.checkpoint.rank_consensus import RankConsensus
from zero_ext.checkpoint.save_session import session_of
from zero_ext.checkpoint.transfer.chunk_reader import (
    Chunk,
    ChunkReader,
    ChunkRequest,
    header_chunk,
    shard_paths,
)
from zero_ext.checkpoint.transfer.device_staging import DeviceStaging

_UNCHANGED = "Nothing of the model was changed."
_HALF_LOADED = (
    "The model now holds a mixture of its old state and the checkpoint. "
    "Load a whole checkpoint before you use it."
)


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The result of a load besides the state that it restored.

    Attributes:
        step: number of the checkpoint.
        client_state: the user's own state.
        extra: named states that were saved with it.
    """

    step: int
    client_state: Any
    extra: dict[str, Any]


def load_state(
    directory: str | os.PathLike[str], source: StateSource, *, step: int | str | None = "latest"
) -> LoadedCheckpoint:
    """Fill `source` from `directory/step-000123`, saved at any world size and ZeRO stage; a collective.

    Float state converts between float32, bfloat16 and float16 where the source keeps another precision than
    the checkpoint. State that the source keeps in a store (`StoredValues`) is written there a chunk at a
    time.

    First the manifest is checked, the model compared with it, and every byte that this rank needs read and
    verified. Only then, from the page cache, is it read again into place. So a damaged, foreign or unfitting
    checkpoint leaves the source as it was. Errors reach every rank. If the second read fails, or a store
    refuses what is written, the error says that the model is half-loaded.

    Args:
        directory: holds the checkpoints.
        source: the state to fill.
        step: number of the checkpoint, or "latest" (None means the same), equal on all ranks.

    Returns:
        Step, client state and named states.

    Raises:
        CheckpointError: the checkpoint is missing or damaged; names file and offset.
        ValueError: `step` is neither, or parameters do not fit; names them.
    """
    session = session_of(source)
    consensus = RankConsensus(
        source.rank, source.world_size, session.group_of(source), f"loading from {directory}"
    )
    root = CheckpointDirectory(Path(directory).absolute())

    def resolve() -> tuple[int | None, int | None]:
        session.finish_previous()
        if not (step is None or step == "latest" or (type(step) is int and step >= 0)):
            raise ValueError(f'step: expected a step number or "latest", got {step!r}. Pass one of these.')
        asked = step if type(step) is int else None
        return asked, root.resolve(asked) if source.rank == 0 else None

    answers = consensus.stage(resolve, _UNCHANGED)
    first, found = answers[0]
    for rank, (asked, _) in enumerate(answers):
        if asked != first:
            raise ValueError(
                f"{consensus.purpose}: step: expected the same on all ranks, got {_step(first)} on rank 0 "
                f"and {_step(asked)} on rank {rank}. Pass the same step on all ranks. {_UNCHANGED}"
            )
    return _Load(source, consensus, root.committed(found)).run()


def _step(step: int | None) -> object:
    return "latest" if step is None else step


@dataclass(frozen=True)
class _Load:
    """One load on one rank."""

    source: StateSource
    consensus: RankConsensus
    path: Path

    def run(self) -> LoadedCheckpoint:
        plans: list[LoadPlan] = []
        checksums = self._stage(lambda: self._plan(plans), _UNCHANGED)
        plan = plans[0]
        requests = self.consensus.collect(json.dumps(plan.requested).encode())
        self._stage(lambda: self._check_ranks_agree(plan, checksums, requests), _UNCHANGED)
        with ChunkReader(shard_paths(self.path, plan.manifest)) as reader:
            self._stage(lambda: self._verify(reader, plan), _UNCHANGED)
            self._stage(lambda: self.source.load_scalar_state(plan.named.scalar_state), _UNCHANGED)
            self._stage(lambda: _fill(reader, plan), _HALF_LOADED)
        self.source.finish_load()
        self.consensus.raise_interrupt()
        return LoadedCheckpoint(plan.manifest.step, plan.named.client_state, plan.named.extra)

    def _stage(self, action: Callable[[], Any], advice: str) -> list[Any]:
        return self.consensus.stage(action, advice)

    def _plan(self, plans: list[LoadPlan]) -> int:
        manifest, checksum = read_manifest(self.path)
        check_manifest(manifest, self.path)
        plans.append(plan_load(self.source, manifest, self.path))
        return checksum

    def _check_ranks_agree(self, plan: LoadPlan, checksums: list[int], requests: list[bytes]) -> None:
        if len(set(checksums)) > 1:
            raise CheckpointError(
                f"{self.path}: the ranks read different manifests. Let no other job save there, and load "
                "again."
            )
        if self.consensus.rank == 0:
            check_requests(plan.manifest, [json.loads(request) for request in requests], self._leaves_aside)

    def _leaves_aside(self, kind: str) -> bool:
        """Return whether the source may leave stored state of this kind where it is."""
        if kind in (MASTER, BUFFER):
            return False
        if isinstance(self.source, OptimizerlessStateSource) and not self.source.trains:
            return True
        return isinstance(self.source, SelectiveStateSource) and self.source.leaves(kind)

    def _verify(self, reader: ChunkReader, plan: LoadPlan) -> None:
        chunks: dict[Chunk, None] = {fill.chunk: None for fill in plan.fills}
        for file in range(self.consensus.rank, len(plan.manifest.files), self.consensus.world_size):
            chunks[header_chunk(plan.manifest, file)] = None
        listed = sorted(chunks)
        for chunk_read in reader.read([ChunkRequest(chunk, None) for chunk in listed]):
            reader.check(listed[chunk_read.request], chunk_read.crc32c)


def _fill(reader: ChunkReader, plan: LoadPlan) -> None:
    staging = DeviceStaging()
    for chunk_read in reader.read([fill.read() for fill in plan.fills]):
        fill = plan.fills[chunk_read.request]
        reader.check(fill.chunk, chunk_read.crc32c)
        fill.write(chunk_read.data, staging)
    with torch.no_grad():
        for buffer, copy in plan.buffers:
            buffer.copy_(copy.reshape(buffer.shape))
