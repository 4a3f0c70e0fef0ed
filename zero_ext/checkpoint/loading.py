"""Loading: everything is checked and every byte verified before any live state is touched."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_ext.checkpoint.chunk_reader import ChunkReader, ChunkRequest, header_chunk, shard_paths
from zero_ext.checkpoint.files import CheckpointError
from zero_ext.checkpoint.format.directory import CheckpointDirectory
from zero_ext.checkpoint.format.manifest import check_manifest, read_manifest
from zero_ext.checkpoint.format.state_source import (
    BUFFER,
    MASTER,
    OptimizerlessStateSource,
    SelectiveStateSource,
    StateSource,
)
from zero_ext.checkpoint.load_plan import LoadPlan, check_requests, plan_load, read_fills
from zero_ext.checkpoint.rank_consensus import RankConsensus
from zero_ext.checkpoint.save_session import session_of
from zero_ext.checkpoint.state_slices import DeviceStaging

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
    directory: str | os.PathLike[str],
    source: StateSource,
    *,
    step: int | str | None = "latest",
    optimizer: bool = True,
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
        optimizer: False fills weights and buffers alone; the scalar state stays as it is too.

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
    return _Load(source, consensus, root.committed(found), optimizer).run()


def _step(step: int | None) -> object:
    return "latest" if step is None else step


@dataclass(frozen=True)
class _Load:
    """One load on one rank."""

    source: StateSource
    consensus: RankConsensus
    path: Path
    optimizer: bool

    def run(self) -> LoadedCheckpoint:
        plans: list[LoadPlan] = []
        stage = self.consensus.stage
        checksums = stage(lambda: self._plan(plans), _UNCHANGED)
        plan = plans[0]
        requests = self.consensus.collect(json.dumps(plan.requested).encode())
        stage(lambda: self._check_ranks_agree(plan, checksums, requests), _UNCHANGED)
        with ChunkReader(shard_paths(self.path, plan.manifest)) as reader:
            stage(lambda: self._verify(reader, plan), _UNCHANGED)
            if self.optimizer:
                stage(lambda: self.source.load_scalar_state(plan.scalar_state), _UNCHANGED)
            stage(lambda: _fill(reader, plan), _HALF_LOADED)
        self.source.finish_load(self.optimizer)
        self.consensus.raise_interrupt()
        return LoadedCheckpoint(plan.manifest.step, plan.client_state, plan.extra)

    def _plan(self, plans: list[LoadPlan]) -> int:
        manifest, checksum = read_manifest(self.path)
        check_manifest(manifest, self.path)
        plans.append(plan_load(self.source, manifest, self.path, self.optimizer))
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
        if not self.optimizer or (
            isinstance(self.source, OptimizerlessStateSource) and not self.source.trains
        ):
            return True
        return isinstance(self.source, SelectiveStateSource) and self.source.leaves(kind)

    def _verify(self, reader: ChunkReader, plan: LoadPlan) -> None:
        headers = range(self.consensus.rank, len(plan.manifest.files), self.consensus.world_size)
        chunks = {fill.chunk for fill in plan.fills}
        chunks.update(header_chunk(plan.manifest, file) for file in headers)
        for _ in reader.verified([ChunkRequest(chunk, None) for chunk in sorted(chunks)]):
            pass


def _fill(reader: ChunkReader, plan: LoadPlan) -> None:
    read_fills(reader, plan.fills, DeviceStaging())
    plan.buffers.finish()
