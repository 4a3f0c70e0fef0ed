"""The work of one rank in a load, planned and checked without changing anything."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zero_ext.checkpoint.chunk_reader import Chunk, ChunkReader, ChunkRequest, slice_chunks
from zero_ext.checkpoint.files import CheckpointError, byte_view
from zero_ext.checkpoint.format.json_state import decode
from zero_ext.checkpoint.format.manifest import (
    MANIFEST_NAME,
    Manifest,
    ParameterRecord,
    SliceRecord,
    slices_by_tensor,
)
from zero_ext.checkpoint.format.state_source import (
    BUFFER,
    MASTER,
    LazyStateSource,
    ParameterDescription,
    StateSource,
)
from zero_ext.checkpoint.format.tensor_files import converts, dtype_named, memory_order
from zero_ext.checkpoint.state_slices import CheckpointSlice, DeviceStaging

SliceIndex = tuple[int, int, int]  # stored tensor (by its index in the sorted list), first element, elements
_MOST_PROBLEMS_SHOWN = 5


class Fill(NamedTuple):
    """Elements of one chunk, from ``skip`` on, for elements [begin, end) of ``target`` (floats convert)."""

    chunk: Chunk
    dtype: torch.dtype
    skip: int
    target: CheckpointSlice
    begin: int
    end: int

    def read(self) -> ChunkRequest:
        """Straight into host memory that takes the whole chunk as it is, else through scratch memory."""
        values = self.target.values
        if isinstance(values, torch.Tensor) and values.device.type == "cpu" and values.dtype == self.dtype:
            destination = byte_view(values[self.begin : self.end])
            if destination.numel() == self.chunk.size:
                return ChunkRequest(self.chunk, destination)
        return ChunkRequest(self.chunk, None)

    def write(self, data: torch.Tensor, staging: DeviceStaging) -> None:
        """Move a chunk's bytes from scratch to where they belong, see :meth:`CheckpointSlice.put`."""
        found = data.view(self.dtype)[self.skip : self.skip + self.end - self.begin]
        self.target.put(self.begin, found, staging)


class BufferCopies:
    """Copies of live buffers in host memory. They are filled first, since buffers have no flat memory."""

    def __init__(self) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def target(self, name: str, buffer: torch.Tensor) -> CheckpointSlice:
        """Return a new copy of ``buffer`` to be filled."""
        copy = torch.empty(buffer.numel(), dtype=buffer.dtype, device="cpu")
        self._copies.append((buffer, copy))
        return CheckpointSlice(BUFFER, name, 0, copy)

    @torch.no_grad()
    def finish(self) -> None:
        """Give the buffers the values of their copies."""
        for buffer, copy in self._copies:
            buffer.copy_(copy.view(buffer.shape))


@dataclass(frozen=True)
class LoadPlan:
    """Everything a rank reads, and where it goes. ``requested`` lists those slices for the other ranks.

    The states are the content of the manifest itself, as Python values.
    """

    manifest: Manifest
    scalar_state: dict[str, Any]
    client_state: Any
    extra: dict[str, Any]
    fills: list[Fill]
    requested: list[SliceIndex]
    buffers: BufferCopies


def plan_load(source: StateSource, manifest: Manifest, path: Path, optimizer: bool) -> LoadPlan:
    """Return the plan for ``source``, without ``optimizer`` for its weights and buffers; ValueError or
    CheckpointError names what does not fit or is damaged.
    """
    try:
        scalar_state = decode(manifest.scalar_state, "scalar_state")
        client_state = decode(manifest.client_state, "client_state")
        extra = {name: decode(state, f"extra.{name}") for name, state in manifest.extra.items()}
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path / MANIFEST_NAME}: {error}") from error
    stored_names = _match_parameters(manifest, source.parameter_table(), path)
    live_buffers = source.buffers()
    _match_buffers(manifest, live_buffers, path)
    stored_tensors = sorted(slices_by_tensor(manifest))
    if optimizer and isinstance(source, LazyStateSource):
        kinds: dict[str, list[str]] = defaultdict(list)
        for kind, name in stored_tensors:
            if kind != BUFFER:
                kinds[name].append(kind)
        source.prepare_load({name: tuple(kinds[stored]) for name, stored in stored_names.items()})
    needed = (each for each in source.load_slices() if optimizer or each.kind == MASTER)
    targets = [_by_stored_name(CheckpointSlice.of(each), stored_names) for each in needed]
    buffers = BufferCopies()
    targets += [buffers.target(name, buffer) for name, buffer in live_buffers.items()]
    targets = [target for target in targets if target.numel]
    try:
        fills = plan_fills(manifest, targets)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    numbers = {key: number for number, key in enumerate(stored_tensors)}
    requested = [(numbers[target.kind, target.name], target.start, target.numel) for target in targets]
    return LoadPlan(manifest, scalar_state, client_state, extra, fills, requested, buffers)


def plan_fills(manifest: Manifest, wanted: Iterable[CheckpointSlice]) -> list[Fill]:
    """Return what to read for ``wanted``, in file order; ValueError names a slice that is not stored so."""
    stored = slices_by_tensor(manifest)
    fills: list[Fill] = []
    for target in wanted:
        records = stored.get((target.kind, target.name))
        if records is None:
            raise ValueError(
                f"{target.label}: it is not in the checkpoint, which may be of another optimizer. Use the "
                "optimizer that it was saved with, or optimizer=False for the weights alone."
            )
        _check_fit(target, records)
        for record in records:
            fills.extend(_fills_of_slice(target, record, manifest.chunk_bytes))
    return sorted(fills, key=lambda fill: fill.chunk)


def read_fills(reader: ChunkReader, fills: Sequence[Fill], staging: DeviceStaging) -> None:
    """Read all of ``fills`` to where they belong, in order; errors as of :meth:`ChunkReader.verified`."""
    for number, data in reader.verified([fill.read() for fill in fills]):
        fills[number].write(data, staging)


def check_requests(
    manifest: Manifest, requests: Iterable[Iterable[SliceIndex]], leaves: Callable[[str], bool]
) -> None:
    """ValueError if something is stored that no rank asks for: to drop it would change the training. State of
    a kind that the source ``leaves`` aside may stay behind."""
    ranges: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for request in requests:
        for number, start, numel in request:
            ranges[number].append((start, start + numel))
    stored = slices_by_tensor(manifest)
    for number, (kind, name) in enumerate(sorted(stored)):
        if leaves(kind):
            continue
        end = 0
        for low, high in sorted(ranges[number]):
            if low > end:
                break
            end = max(end, high)
        if end < stored[kind, name][-1].start + stored[kind, name][-1].numel:
            asked = "nothing of it" if end == 0 else f"only its first {end} elements"
            raise ValueError(
                f"{kind} of {name!r}: the checkpoint holds it, but the model asks for {asked}. Use the "
                "optimizer that it was saved with (or optimizer=False for the weights alone), and make the "
                "parameter trainable if it was trained."
            )


def refuse_misfits(subject: str, problems: Sequence[str], advice: str) -> None:
    """ValueError about ``subject`` with the first of ``problems`` and the number of the others, if any."""
    if problems:
        shown = "; ".join(problems[:_MOST_PROBLEMS_SHOWN])
        left = len(problems) - _MOST_PROBLEMS_SHOWN
        more = f" and {left} more" if left > 0 else ""
        raise ValueError(f"{subject}: {shown}{more}. {advice}")


def _by_stored_name(target: CheckpointSlice, stored_names: Mapping[str, str]) -> CheckpointSlice:
    if target.name not in stored_names:
        raise ValueError(
            f"{target.label}: load_slices() asks for it, but parameter_table() has no such parameter. List "
            "it there."
        )
    return target._replace(name=stored_names[target.name])


def _match_parameters(
    manifest: Manifest, table: Mapping[str, ParameterDescription], path: Path
) -> dict[str, str]:
    """Return the name in the checkpoint of each parameter of the model; they differ only where tied names do.

    ValueError lists the parameters that are missing, unexpected, tied otherwise, of another shape, or in
    another memory order. The compute precision and whether a parameter is trained may differ.
    """
    by_any_name = {
        alias: name for name, entry in manifest.parameters.items() for alias in (name, *entry.aliases)
    }
    found: dict[str, str] = {}
    problems = []
    for name, entry in table.items():
        stored = by_any_name.get(name)
        if stored is None:
            problems.append(f"parameter {name!r} is missing in the checkpoint")
            continue
        found[name] = stored
        problem = _difference({name, *entry.aliases}, entry, stored, manifest.parameters[stored])
        if problem:
            problems.append(f"parameter {name!r}: {problem}")
    unexpected = manifest.parameters.keys() - set(found.values())
    problems.extend(f"parameter {name!r} is not in the model" for name in sorted(unexpected))
    _refuse(problems, path)
    return found


def _match_buffers(manifest: Manifest, buffers: Mapping[str, torch.Tensor], path: Path) -> None:
    """ValueError lists the buffers that are missing, unexpected, of another shape or kind of dtype."""
    problems = []
    for name, buffer in buffers.items():
        record = manifest.buffers.get(name)
        if record is None:
            problems.append(f"buffer {name!r} is missing in the checkpoint")
        elif list(buffer.shape) != record.shape:
            problems.append(f"buffer {name!r}: expected shape {list(buffer.shape)}, got {record.shape}")
        elif not converts(dtype_named(record.dtype), buffer.dtype):
            problems.append(f"buffer {name!r}: expected {buffer.dtype}, got {record.dtype}")
    unexpected = manifest.buffers.keys() - buffers.keys()
    problems.extend(f"buffer {name!r} is not in the model" for name in sorted(unexpected))
    _refuse(problems, path)


def _refuse(problems: Sequence[str], path: Path) -> None:
    advice = (
        "Build the model as it was saved, with the same names, ties, shapes and memory formats, load "
        "another checkpoint, or load what fits of its weights by zero_ext.load_weights(..., strict=False)."
    )
    refuse_misfits(f"{path}: it does not fit this model", problems, advice)


def _difference(
    names: set[str], entry: ParameterDescription, stored: str, record: ParameterRecord
) -> str | None:
    stored_names = {stored, *record.aliases}
    if names != stored_names:
        return f"expected the names {', '.join(sorted(names))}, got {', '.join(sorted(stored_names))}"
    if list(entry.shape) != record.shape:
        return f"expected shape {list(entry.shape)}, got {record.shape}"
    if memory_order(entry.shape, entry.stride) != memory_order(record.shape, record.stride):
        return f"expected stride {list(entry.stride)}, got {record.stride}, another memory format"
    return None


def _check_fit(target: CheckpointSlice, records: list[SliceRecord]) -> None:
    own, stored = (
        "the parameter's shape" if shape is None else f"shape {list(shape)}"
        for shape in (target.shape, records[0].shape)
    )
    if own != stored:
        raise ValueError(
            f"{target.label}: expected {own}, got {stored} in the checkpoint. Use the optimizer and settings "
            "that it was saved with."
        )
    elements = records[-1].start + records[-1].numel
    if target.start + target.numel > elements:
        raise ValueError(
            f"{target.label}: expected elements {target.start} to {target.start + target.numel}, got only "
            f"the first {elements} in the checkpoint. Use the model and optimizer that it was saved with."
        )
    dtype = dtype_named(records[0].dtype)
    if not converts(dtype, target.values.dtype):
        raise ValueError(
            f"{target.label}: expected {target.values.dtype}, got {dtype} in the checkpoint. Use the model "
            "and optimizer that it was saved with."
        )


def _fills_of_slice(target: CheckpointSlice, record: SliceRecord, chunk_bytes: int) -> Iterator[Fill]:
    begin = max(target.start, record.start)
    end = min(target.start + target.numel, record.start + record.numel)
    if begin >= end:
        return
    dtype = dtype_named(record.dtype)
    chunk_elements = chunk_bytes // dtype.itemsize
    first = (begin - record.start) // chunk_elements
    last = (end - 1 - record.start) // chunk_elements
    for index, chunk in enumerate(slice_chunks(record, chunk_bytes, first, last + 1), first):
        chunk_start = record.start + index * chunk_elements
        low = max(begin, chunk_start)
        high = min(end, chunk_start + chunk.size // dtype.itemsize)
        yield Fill(chunk, dtype, low - chunk_start, target, low - target.start, high - target.start)
