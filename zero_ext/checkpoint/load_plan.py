"""The work of one rank in a load, planned and checked without changing anything."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zero_ext.checkpoint.compatibility_check import match_buffers, match_parameters
from zero_ext.checkpoint.files.checkpoint_error import CheckpointError
from zero_ext.checkpoint.format.json_state import decode
from zero_ext.checkpoint.format.manifest import MANIFEST_NAME, Manifest
from zero_ext.checkpoint.format.manifest_check import tensor_elements
from zero_ext.checkpoint.format.state_source import BUFFER, LazyStateSource, StateSource
from zero_ext.checkpoint.transfer.read_plan import Fill, FillTarget, check_slice, plan_fills

SliceIndex = tuple[int, int, int]  # stored tensor (by its index in the sorted list), first element, elements


@dataclass(frozen=True)
class NamedStates:
    """The content of the manifest itself, as Python values."""

    scalar_state: dict[str, Any]
    client_state: Any
    extra: dict[str, Any]


@dataclass(frozen=True)
class LoadPlan:
    """Everything a rank reads, and where it goes. ``requested`` lists those slices for the other ranks."""

    manifest: Manifest
    named: NamedStates
    fills: list[Fill]
    requested: list[SliceIndex]
    buffers: list[tuple[torch.Tensor, torch.Tensor]]  # live buffer, host copy to be filled


def plan_load(source: StateSource, manifest: Manifest, path: Path) -> LoadPlan:
    """Return the plan for ``source``; ValueError or CheckpointError names what does not fit or is damaged."""
    named = _named_states(manifest, path)
    stored_names = match_parameters(manifest, source.parameter_table(), path)
    live_buffers = source.buffers()
    match_buffers(manifest, live_buffers, path)
    if isinstance(source, LazyStateSource):
        source.prepare_load(_kinds(manifest, stored_names))
    targets = [_fill_target(needed, stored_names) for needed in source.load_slices()]
    buffers = []
    for name, buffer in live_buffers.items():
        copy = torch.empty(buffer.numel(), dtype=buffer.dtype, device="cpu")
        buffers.append((buffer, copy))
        targets.append(FillTarget(BUFFER, name, 0, copy))
    targets = [target for target in targets if target.numel]
    try:
        fills = plan_fills(manifest, targets)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    numbers = {key: number for number, key in enumerate(_stored_tensors(manifest))}
    requested = [(numbers[target.kind, target.name], target.start, target.numel) for target in targets]
    return LoadPlan(manifest, named, fills, requested, buffers)


def check_requests(
    manifest: Manifest, requests: Iterable[Iterable[SliceIndex]], leaves: Callable[[str], bool]
) -> None:
    """ValueError if something is stored that no rank asks for: to drop it would change the training. State of
    a kind that the source ``leaves`` aside may stay behind."""
    ranges: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for request in requests:
        for number, start, numel in request:
            ranges[number].append((start, start + numel))
    for number, (kind, name) in enumerate(_stored_tensors(manifest)):
        if leaves(kind):
            continue
        end = 0
        for low, high in sorted(ranges[number]):
            if low > end:
                break
            end = max(end, high)
        if end < tensor_elements(manifest, kind, name):
            asked = "nothing of it" if end == 0 else f"only its first {end} elements"
            raise ValueError(
                f"{kind} of {name!r}: the checkpoint holds it, but the model asks for {asked}. Use the "
                "optimizer that it was saved with, and make the parameter trainable if it was trained."
            )


def _named_states(manifest: Manifest, path: Path) -> NamedStates:
    try:
        return NamedStates(
            scalar_state=decode(manifest.scalar_state, "scalar_state"),
            client_state=decode(manifest.client_state, "client_state"),
            extra={name: decode(state, f"extra.{name}") for name, state in manifest.extra.items()},
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path / MANIFEST_NAME}: {error}") from error


def _fill_target(needed: Any, stored_names: Mapping[str, str]) -> FillTarget:
    check_slice(needed)
    if needed.name not in stored_names:
        raise ValueError(
            f"{needed.kind} of {needed.name!r}: load_slices() asks for it, but parameter_table() has no such "
            "parameter. List it there."
        )
    values = needed.tensor.detach() if isinstance(needed.tensor, torch.Tensor) else needed.tensor
    return FillTarget(needed.kind, stored_names[needed.name], needed.start, values)


def _stored_tensors(manifest: Manifest) -> list[tuple[str, str]]:
    return sorted({(needed.kind, needed.name) for needed in manifest.slices})


def _kinds(manifest: Manifest, stored_names: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    by_stored: dict[str, list[str]] = defaultdict(list)
    for kind, name in _stored_tensors(manifest):
        if kind != BUFFER:
            by_stored[name].append(kind)
    return {name: tuple(by_stored[stored]) for name, stored in stored_names.items()}
