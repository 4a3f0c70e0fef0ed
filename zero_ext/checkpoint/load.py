"""Loading: everything is checked and every byte verified before any live state is touched."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zero_ext.checkpoint.agreement import Agreement
from zero_ext.checkpoint.chunk_reader import Chunk, ChunkReader, Read, header_chunk
from zero_ext.checkpoint.directory import CheckpointDirectory
from zero_ext.checkpoint.errors import CheckpointError
from zero_ext.checkpoint.fill_plan import Fill, Wanted, check_piece, plan_fills
from zero_ext.checkpoint.manifest import Manifest, read_manifest
from zero_ext.checkpoint.manifest_check import check_manifest, tensor_elements
from zero_ext.checkpoint.match import match_buffers, match_parameters
from zero_ext.checkpoint.named_state import decode
from zero_ext.checkpoint.session import session_of
from zero_ext.checkpoint.source import BUFFER, LazyStateSource, StateSource

_UNCHANGED = "Nothing of the model was changed"
_HALF_LOADED = (
    "The model now holds a mixture of its old state and the checkpoint: "
    "load a whole checkpoint before using it"
)
_RunIndex = tuple[int, int, int]  # stored tensor (by its place in the sorted list), first element, elements


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What a load brings back beside the source's own state."""

    step: int
    client_state: Any
    extra: dict[str, Any]


def load_checkpoint(
    directory: str | os.PathLike[str], source: StateSource, *, step: int | str | None = "latest"
) -> LoadedCheckpoint:
    """Fills ``source`` from ``directory/step-000123``, saved at any world size and ZeRO stage.

    All ranks call it together. ``step``: a number, or "latest" (None means the same). Float state converts
    between float32, bfloat16 and float16 where the source keeps another precision than the checkpoint.

    First the manifest is checked, the model compared with it, and every byte that this rank needs read and
    verified; only then, from the page cache, is it read again into place. So a damaged, foreign or unfitting
    checkpoint leaves the source as it was. Errors reach every rank: CheckpointError naming file and offset,
    ValueError naming the parameters that do not fit. Should the second read fail, the error says that the
    model is half-loaded.
    """
    session = session_of(source)
    agreement = Agreement(
        source.rank, source.world_size, session.group_of(source), f"loading from {directory}"
    )
    root = CheckpointDirectory(Path(directory).absolute())

    def resolve() -> int | None:
        session.finish_previous()
        if not (step is None or step == "latest" or (type(step) is int and step >= 0)):
            raise ValueError(f'step is {step!r}; give a step number or "latest"')
        return root.resolve(step if type(step) is int else None) if source.rank == 0 else None

    found = agreement.stage(resolve, _UNCHANGED)[0]
    return _Load(source, agreement, root.committed(found)).run()


@dataclass
class _Load:
    """One load on one rank."""

    source: StateSource
    agreement: Agreement
    path: Path

    def run(self) -> LoadedCheckpoint:
        plans: list[_Plan] = []
        checksums = self.agreement.stage(lambda: self._plan_into(plans), _UNCHANGED)
        self._stage(lambda: _check_same(checksums, self.path))
        plan = plans[0]
        parts = self.agreement.collect(json.dumps(plan.requested).encode())
        self._stage(lambda: self._check_requests(plan.manifest, parts))
        with ChunkReader(self.path, plan.manifest) as reader:
            self._stage(lambda: self._verify(reader, plan))
            self._stage(lambda: self.source.load_scalar_state(plan.scalar_state), _HALF_LOADED)
            self._stage(lambda: _fill(reader, plan), _HALF_LOADED)
        self.source.finish_load()
        return LoadedCheckpoint(plan.manifest.step, plan.client_state, plan.extra)

    def _plan_into(self, plans: list[_Plan]) -> int:
        manifest, checksum = read_manifest(self.path)
        check_manifest(manifest, self.path)
        plans.append(_plan(self.source, manifest, self.path))
        return checksum

    def _stage(self, action: Any, advice: str = _UNCHANGED) -> None:
        self.agreement.stage(action, advice)

    def _check_requests(self, manifest: Manifest, parts: list[bytes]) -> None:
        if self.agreement.rank == 0:
            _check_requests(manifest, [json.loads(part) for part in parts])

    def _verify(self, reader: ChunkReader, plan: _Plan) -> None:
        chunks: dict[Chunk, None] = {fill.chunk: None for fill in plan.fills}
        for file in range(self.agreement.rank, len(plan.manifest.files), self.agreement.world_size):
            chunks[header_chunk(plan.manifest, file)] = None
        listed = list(chunks)
        for arrived in reader.read([Read(chunk, None) for chunk in listed]):
            reader.check(listed[arrived.request], arrived.crc32c)


@dataclass(frozen=True)
class _Plan:
    """What this rank will do once everybody has agreed; making it has changed nothing."""

    manifest: Manifest
    fills: list[Fill]
    requested: list[_RunIndex]
    buffers: list[tuple[torch.Tensor, torch.Tensor]]  # live buffer, host copy to be filled
    scalar_state: dict[str, Any]
    client_state: Any
    extra: dict[str, Any]


def _check_same(checksums: list[int], path: Path) -> None:
    if len(set(checksums)) > 1:
        raise CheckpointError(f"{path}: ranks read different manifests; is another job saving there?")


def _plan(source: StateSource, manifest: Manifest, path: Path) -> _Plan:
    stored_names = match_parameters(manifest, source.parameter_table(), path)
    live_buffers = source.buffers()
    match_buffers(manifest, live_buffers, path)
    if isinstance(source, LazyStateSource):
        source.prepare_load(_kinds(manifest, stored_names))
    wanted = []
    for piece in source.load_pieces():
        check_piece(piece)
        if piece.name not in stored_names:
            raise ValueError(f"{piece.kind} of {piece.name!r} is asked for, but no such parameter is listed")
        wanted.append(Wanted(piece.kind, stored_names[piece.name], piece.start, piece.tensor.detach()))
    buffers = []
    for name, buffer in live_buffers.items():
        copy = torch.empty(buffer.numel(), dtype=buffer.dtype)
        buffers.append((buffer, copy))
        wanted.append(Wanted(BUFFER, name, 0, copy))
    try:
        fills = plan_fills(manifest, wanted)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    numbers = {key: number for number, key in enumerate(_stored_tensors(manifest))}
    return _Plan(
        manifest=manifest,
        fills=fills,
        requested=[
            (numbers[run.kind, run.name], run.start, run.tensor.numel())
            for run in wanted
            if run.tensor.numel()
        ],
        buffers=buffers,
        scalar_state=decode(manifest.scalar_state, "scalar_state"),
        client_state=decode(manifest.client_state, "client_state"),
        extra={name: decode(state, f"extra.{name}") for name, state in manifest.extra.items()},
    )


def _stored_tensors(manifest: Manifest) -> list[tuple[str, str]]:
    return sorted({(piece.kind, piece.name) for piece in manifest.pieces})


def _kinds(manifest: Manifest, stored_names: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    by_stored: dict[str, list[str]] = defaultdict(list)
    for kind, name in _stored_tensors(manifest):
        if kind != BUFFER:
            by_stored[name].append(kind)
    return {name: tuple(by_stored[stored]) for name, stored in stored_names.items()}


def _check_requests(manifest: Manifest, parts: Iterable[Iterable[_RunIndex]]) -> None:
    """ValueError if something is stored that no rank asks for: to drop it would change the training."""
    runs: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for part in parts:
        for number, start, numel in part:
            runs[number].append((start, start + numel))
    for number, (kind, name) in enumerate(_stored_tensors(manifest)):
        end = 0
        for low, high in sorted(runs[number]):
            if low > end:
                break
            end = max(end, high)
        if end < tensor_elements(manifest, kind, name):
            asked = "nothing of it" if end == 0 else f"only {end} elements"
            raise ValueError(
                f"the checkpoint holds {kind} of {name!r}, the model asks for {asked}; was it saved with "
                "another optimizer, or while the parameter was trainable?"
            )


def _fill(reader: ChunkReader, plan: _Plan) -> None:
    for arrived in reader.read([fill.read() for fill in plan.fills]):
        fill = plan.fills[arrived.request]
        reader.check(fill.chunk, arrived.crc32c)
        fill.place(arrived.data)
    with torch.no_grad():
        for buffer, copy in plan.buffers:
            buffer.copy_(copy.reshape(buffer.shape))
