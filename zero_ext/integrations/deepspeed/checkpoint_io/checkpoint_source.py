"""A DeepSpeed checkpoint as a whole: its parameters, where their elements lie, and everything
besides them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zero_ext.checkpoint import CheckpointError
from zero_ext.checkpoint.format.state_source import MASTER
from zero_ext.integrations.deepspeed.checkpoint_io.checkpoint_fields import (
    ModelFile,
    RankState,
    client_state,
    damaged,
    read_rank,
    stored_tensor,
)
from zero_ext.integrations.deepspeed.checkpoint_io.checkpoint_folder import CheckpointFiles
from zero_ext.integrations.deepspeed.checkpoint_io.checkpoint_pickle import read_pickled
from zero_ext.integrations.torch_archive import UnfitContent

_UNREADABLE = {
    "mp_world_size": "of tensor parallelism",
    "universal_checkpoint_info": "of tensor parallelism",
    "autoep_layers": "of expert parallelism",
    "num_experts": "of expert parallelism",
}


Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Fragment:
    """Elements [start, start + numel) of a parameter are elements [begin, begin + numel) of flat partition
    ``flat`` of ``rank``."""

    rank: int
    flat: int
    begin: int
    start: int
    numel: int


@dataclass(frozen=True)
class StoredParameter:
    """A parameter; ``dtype`` is what it computes in. ``group`` is its param group, None if it is frozen: then
    its values are in the model's files."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    group: int | None
    fragments: tuple[Fragment, ...]


@dataclass(frozen=True)
class DeepSpeedCheckpoint:
    """Tables of one checkpoint; ``rank`` reads the tensors. ``aliases`` are the further names of tied
    parameters by their first name; ``buffers`` are whole; ``first`` is rank 0's optimizer file, with
    the settings of all ranks; ``model`` has the other values of the model's file, ``client_state`` what
    the user gave to ``save_checkpoint``."""

    files: CheckpointFiles
    first: RankState
    parameters: Mapping[str, StoredParameter]
    aliases: Mapping[str, list[str]]
    buffers: Mapping[str, torch.Tensor]
    model: ModelFile
    client_state: dict[Any, Any]

    @property
    def world_size(self) -> int:
        """Ranks that saved it."""
        return len(self.files.optimizer)

    def trained(self) -> Iterator[tuple[str, StoredParameter, int]]:
        """Parameters that the optimizer has, with their param groups."""
        for name, entry in self.parameters.items():
            if entry.group is not None:
                yield name, entry, entry.group

    def rank(self, rank: int) -> RankTensors:
        """Return the tensors of one rank, mapped from its files."""
        frozen = frozen_values(self.files, self.model, self.parameters, rank)
        return RankTensors(read_rank(self.files.optimizer[rank]), frozen)


@dataclass(frozen=True)
class RankTensors:
    """The content of the files of one rank."""

    state: RankState
    frozen: Mapping[str, torch.Tensor]

    def state_of(
        self, name: str, entry: StoredParameter, fragment: Fragment
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the elements [n] of ``fragment``, which this rank has: first the values, then the optimizer
        state of each kind."""
        if entry.group is None:
            yield MASTER, self.frozen[name]
            return
        for kind, flat in {
            MASTER: self.state.file.masters[fragment.flat],
            **self.state.moments[fragment.flat],
        }.items():
            yield kind, flat[fragment.begin : fragment.begin + fragment.numel]


def open_checkpoint(files: CheckpointFiles) -> DeepSpeedCheckpoint:
    """Read the tables of all files and check that they belong together and add up.

    CheckpointError names the file and what is wrong. At any time one rank's tensors are mapped.
    """
    first = read_rank(files.optimizer[0])
    _check_stage(files, first)
    content = read_pickled(files.model[0])
    _check_readable(content, files)
    model = ModelFile.of(content, files.model[0])
    if model.dp_world_size not in (None, len(files.optimizer)):
        raise CheckpointError(
            f"{files.model[0]}: expected {model.dp_world_size} '*_optim_states.pt' files, one per rank, got "
            f"{len(files.optimizer)}. Copy the files of all ranks."
        )
    sizes, slices = [first.sizes], [first.file.param_slice_mappings]
    for path in files.optimizer[1:]:
        state = read_rank(path)
        _check_same(first, state)
        sizes.append(state.sizes)
        slices.append(state.file.param_slice_mappings)
    trained = _trained(first, model, files.model[0], sizes)
    # With round_robin_gradients DeepSpeed notes the addresses that parameters would have without it.
    in_order = model.configured("zero_optimization", "round_robin_gradients") is not True
    for rank, table in enumerate(slices):
        if table is not None and in_order:
            _check_slices(files, rank, table, trained)
    buffers = {name: stored_tensor(model.module, name, files.model[0]) for name in model.buffer_names}
    shared = model.shared_params or {}
    frozen = frozen_parameters(files, model, {*trained, *buffers, *shared})
    for name in frozen.keys() & trained.keys():
        raise damaged(files.model[0], "frozen_param_shapes", f"lists {name!r}, which is trained")
    parameters = {**trained, **frozen}
    aliases: dict[str, list[str]] = {}
    for name, own in shared.items():
        # Parameters without elements all begin at address 0, which DeepSpeed takes for sharing.
        if name not in parameters and own in parameters:
            aliases.setdefault(own, []).append(name)
    found = DeepSpeedCheckpoint(files, first, parameters, aliases, buffers, model, client_state(content))
    for rank in range(len(files.model)):
        frozen_values(files, model, parameters, rank)
    return found


def _check_stage(files: CheckpointFiles, state: RankState) -> None:
    if state.file.partition_count != len(files.optimizer):
        raise CheckpointError(
            f"{state.path}: expected {state.file.partition_count} '*_optim_states.pt' files in {files.path}, "
            f"one per rank, got {len(files.optimizer)}. Copy the files of all ranks, and of this run alone."
        )
    if (state.file.zero_stage == 3) != files.model_by_rank:
        raise CheckpointError(
            f"{state.path}: expected stage {'3' if files.model_by_rank else '1 or 2'} as of "
            f"{files.model[0].name}, got {state.file.zero_stage}: files of two checkpoints are mixed in "
            f"{files.path}. Copy the files of one."
        )


def _check_readable(content: Mapping[Any, Any], files: CheckpointFiles) -> None:
    for key, what in _UNREADABLE.items():
        value = content.get(key)
        if value is not None and not (type(value) is int and value == 1):
            raise CheckpointError(
                f"{files.model[0]}: {key}: a checkpoint {what} is not supported. Use DeepSpeed to export its "
                "weights."
            )


def _check_same(first: RankState, state: RankState) -> None:
    own, wanted = state.plain(), first.plain()
    for what, value in own.items():
        if value != wanted[what]:
            raise CheckpointError(
                f"{state.path}: {what}: expected {wanted[what]!r:.200} as in {first.path.name}, got "
                f"{value!r:.200}: files of two checkpoints are mixed. Copy the files of one."
            )


def _trained(
    first: RankState, model: ModelFile, path: Path, sizes: list[list[int]]
) -> dict[str, StoredParameter]:
    if len(model.param_shapes) != len(first.flat_groups):
        groups = f"{len(model.param_shapes)} groups, {first.path.name} {len(first.flat_groups)}"
        raise damaged(path, "param_shapes", f"has {groups}")
    found: dict[str, StoredParameter] = {}
    for flat, (shapes, group) in enumerate(zip(model.param_shapes, first.flat_groups, strict=True)):
        of_ranks = [size[flat] for size in sizes]
        try:
            if first.file.zero_stage == 3:
                fragments = stage3_layout(flat, shapes, of_ranks)
            else:
                paddings = first.file.param_alignment_paddings
                gaps = [0] * len(shapes) if paddings is None else paddings[flat]
                fragments = stage1_and_2_layout(flat, shapes, gaps, of_ranks)
        except ValueError as error:
            raise damaged(path, "param_shapes", f"does not fit the files next to it: {error}") from None
        for name, of_name in fragments.items():
            if name in found:
                raise damaged(path, "param_shapes", f"lists {name!r} twice")
            in_module = name in model.module
            dtype = stored_tensor(model.module, name, path).dtype if in_module else torch.float32
            found[name] = StoredParameter(shapes[name], dtype, group, tuple(of_name))
    return found


def _check_slices(
    files: CheckpointFiles,
    rank: int,
    table: list[dict[str, tuple[int, int]]],
    trained: Mapping[str, StoredParameter],
) -> None:
    """Check that the addresses that the rank wrote down are those that the shapes give."""
    table = [{name: address for name, address in own.items() if address[1]} for own in table]
    wanted: list[dict[str, tuple[int, int]]] = [{} for _ in table]
    for name, entry in trained.items():
        for fragment in entry.fragments:
            if fragment.rank == rank:
                wanted[fragment.flat][name] = (fragment.begin, fragment.numel)
    if table != wanted:
        flat = next(number for number, own in enumerate(table) if own != wanted[number])
        name = next(iter(dict(table[flat].items() ^ wanted[flat].items())))
        raise CheckpointError(
            f"{files.optimizer[rank]}: param_slice_mappings: expected {name!r} of group {flat} at "
            f"{wanted[flat].get(name)} (begin, elements), by the shapes in {files.model[0].name}, got "
            f"{table[flat].get(name)}: files of two checkpoints are mixed. Copy the files of one."
        )


def _frozen_table(files: CheckpointFiles, model: ModelFile) -> Mapping[str, Any]:
    return model.frozen_param_fragments or {} if files.model_by_rank else model.module


def frozen_parameters(
    files: CheckpointFiles, model: ModelFile, known: set[str]
) -> dict[str, StoredParameter]:
    """Return the parameters in the model's files that are not ``known`` as trained, tied or buffers."""
    table, path = _frozen_table(files, model), files.model[0]
    if files.model_by_rank:
        shapes = model.frozen_param_shapes or {}
    else:
        # All that the module holds and nobody else does: stage 1 writes no list of them.
        rest = [name for name in table if name not in known]
        shapes = {name: tuple(stored_tensor(table, name, path).shape) for name in rest}
    found = {}
    for name, shape in shapes.items():
        dtype, fragments = (
            stored_tensor(table, name, path).dtype,
            even_fragments(math.prod(shape), len(files.model)),
        )
        found[name] = StoredParameter(shape, dtype, None, tuple(fragments))
    return found


def frozen_values(
    files: CheckpointFiles, first: ModelFile, parameters: Mapping[str, StoredParameter], rank: int
) -> dict[str, torch.Tensor]:
    """Return the elements of the frozen ``parameters`` that lie with ``rank``, each 1-D; padding is left out.

    Each rank has one fragment of a parameter at most. CheckpointError if its file is of another step than the
    ``first``.
    """
    if rank >= len(files.model):
        return {}
    path = files.model[rank]
    model = ModelFile.of(read_pickled(path), path)
    if model.global_steps != first.global_steps:
        raise CheckpointError(
            f"{path}: expected step {first.global_steps} as in {files.model[0].name}, got "
            f"{model.global_steps}: files of two checkpoints are mixed. Copy the files of one."
        )
    table, found = _frozen_table(files, model), {}
    for name, entry in parameters.items():
        for fragment in entry.fragments if entry.group is None else ():
            if fragment.rank != rank:
                continue
            value = stored_tensor(table, name, path).detach().contiguous().reshape(-1)
            if value.numel() < fragment.numel:
                raise damaged(path, name, f"has {value.numel()} elements, expected {fragment.numel}")
            found[name] = value[: fragment.numel]
    return found


def stage1_and_2_layout(
    flat: int, shapes: Shapes, gaps: Sequence[int], sizes: Sequence[int]
) -> dict[str, list[Fragment]]:
    """Fragments at stages 1 and 2: ``gaps`` are the elements left free after each parameter, ``sizes`` the
    elements of every rank's partition. ValueError if they do not add up."""
    if len(gaps) != len(shapes):
        raise UnfitContent(f"group {flat} has {len(shapes)} parameters and {len(gaps)} alignment paddings")
    partition, ranks = sizes[0], len(sizes)
    for rank, size in enumerate(sizes):
        if size > partition or (size < partition and rank < ranks - 1):
            raise UnfitContent(
                f"group {flat}: the partitions have {list(sizes)[:8]} elements; all ranks before the last "
                "have the same number, the last no more"
            )
    needed = sum(math.prod(shape) for shape in shapes.values()) + sum(gaps)
    stored, unit = sum(sizes), 2 * ranks
    if stored < needed or stored > -(-needed // unit) * unit:
        raise UnfitContent(
            f"group {flat}: its {len(shapes)} parameters take {needed} elements, the partitions of {ranks} "
            f"ranks hold {stored}"
        )
    found: dict[str, list[Fragment]] = {}
    offset = 0
    for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
        numel = math.prod(shape)
        found[name] = []
        first = offset // partition if partition else 0
        for rank in range(first, ranks):
            low, high = max(offset, rank * partition), min(offset + numel, rank * partition + sizes[rank])
            if low >= offset + numel:
                break
            if low < high:
                found[name].append(Fragment(rank, flat, low - rank * partition, low - offset, high - low))
        offset += numel + gap
    return found


def stage3_layout(flat: int, shapes: Shapes, sizes: Sequence[int]) -> dict[str, list[Fragment]]:
    """Fragments at stage 3, of sub-group ``flat``. ValueError if the sizes do not add up."""
    ranks = len(sizes)
    needed = sum(-(-math.prod(shape) // ranks) for shape in shapes.values())
    for rank, size in enumerate(sizes):
        if size != needed:
            raise UnfitContent(
                f"sub-group {flat}: its {len(shapes)} parameters take {needed} elements per rank, rank "
                f"{rank} holds {size}"
            )
    found: dict[str, list[Fragment]] = {}
    begin = 0
    for name, shape in shapes.items():
        found[name] = even_fragments(math.prod(shape), ranks, flat, begin)
        begin += -(-math.prod(shape) // ranks)
    return found


def even_fragments(numel: int, ranks: int, flat: int = 0, begin: int = 0) -> list[Fragment]:
    """``numel`` elements in equal parts, each at ``begin`` of its rank's flat partition; padding left out."""
    size = -(-numel // ranks)
    return [
        Fragment(rank, flat, begin, rank * size, min(size, numel - rank * size))
        for rank in range(ranks)
        if rank * size < numel
    ]
