"""A DeepSpeed checkpoint as a whole: its parameters, where their elements lie, and everything beside them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zero_ext.checkpoint import CheckpointError
from zero_ext.checkpoint.dtypes import SAFETENSORS_CODES
from zero_ext.checkpoint.source import MASTER
from zero_ext.integrations.deepspeed.checkpoint_fields import Fields
from zero_ext.integrations.deepspeed.checkpoint_folder import CheckpointFiles
from zero_ext.integrations.deepspeed.checkpoint_layout import Fragment, joined_layout, parted, parted_layout
from zero_ext.integrations.deepspeed.checkpoint_pickle import read_pickled
from zero_ext.integrations.deepspeed.checkpoint_rank import RankState, read_rank

_OWN_KEYS = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
    "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size",
    "checkpoint_parallel_dimensions", "ds_config", "ds_version",
}  # fmt: skip
_UNREADABLE = {
    "universal_checkpoint_info": "of tensor parallelism",
    "autoep_layers": "of expert parallelism",
    "num_experts": "of expert parallelism",
}


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
    parameters by their first name; ``buffers`` are whole; ``first`` is rank 0's optimizer file, whose
    settings are those of all ranks; ``fields`` is what the model's file says besides."""

    files: CheckpointFiles
    first: RankState
    parameters: Mapping[str, StoredParameter]
    aliases: Mapping[str, tuple[str, ...]]
    buffers: Mapping[str, torch.Tensor]
    fields: Fields

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
        """The tensors of one rank, mapped from its files."""
        return RankTensors(read_rank(self.files.optimizer[rank]), self._frozen_values(rank))

    def _frozen_values(self, rank: int) -> dict[str, torch.Tensor]:
        """The elements of the frozen parameters that lie with ``rank``, each 1-D; padding is left out. Each
        rank has one fragment of a parameter at most."""
        wanted = {
            name: part.numel
            for name, entry in self.parameters.items()
            for part in entry.fragments
            if entry.group is None and part.rank == rank
        }
        if not wanted:
            return {}
        fields = Fields(read_pickled(self.files.model[rank]), self.files.model[rank])
        return {name: _values(_frozen_fields(self.files, fields), name, n) for name, n in wanted.items()}

    def client_state(self) -> dict[Any, Any]:
        """What the user gave to ``save_checkpoint``."""
        return {key: value for key, value in self.fields.values.items() if key not in _OWN_KEYS}


@dataclass(frozen=True)
class RankTensors:
    """What lies in the files of one rank."""

    state: RankState
    frozen: Mapping[str, torch.Tensor]

    def runs(self, name: str, entry: StoredParameter, part: Fragment) -> Iterator[tuple[str, torch.Tensor]]:
        """The elements [n] of ``part``, a fragment with this rank: first their values, then the optimizer's
        state of each kind."""
        if entry.group is None:
            yield MASTER, self.frozen[name]
            return
        for kind, flat in {MASTER: self.state.masters[part.flat], **self.state.moments[part.flat]}.items():
            yield kind, flat[part.begin : part.begin + part.numel]


def open_checkpoint(files: CheckpointFiles) -> DeepSpeedCheckpoint:
    """Reads the tables of all files and checks that they belong together and add up.

    CheckpointError names the file and what is wrong. At any time one rank's tensors are mapped.
    """
    first = read_rank(files.optimizer[0])
    _check_stage(files, first)
    fields = Fields(read_pickled(files.model[0]), files.model[0])
    _check_readable(fields, len(files.optimizer))
    sizes, slices = [first.sizes], [first.slices]
    for path in files.optimizer[1:]:
        state = read_rank(path)
        _check_same(first, state)
        sizes.append(state.sizes)
        slices.append(state.slices)
    module = fields.inner("module")
    trained = _trained(first, fields, sizes)
    # With round_robin_gradients DeepSpeed notes the addresses that parameters would have without it.
    told = not _round_robin(fields)
    for rank, table in enumerate(slices):
        if table is not None and told:
            _check_slices(files, rank, table, trained)
    buffers = {name: _tensor(module, name) for name in fields.strings("buffer_names")}
    shared = _shared(fields)
    frozen = _frozen(files, fields, {*trained, *buffers, *shared})
    for name in frozen.keys() & trained.keys():
        raise fields.error("frozen_param_shapes", f"lists {name!r}, which is trained")
    parameters = {**trained, **frozen}
    aliases: dict[str, tuple[str, ...]] = {}
    for name, own in shared.items():
        # Parameters without elements all begin at address 0, which DeepSpeed takes for sharing.
        if name not in parameters and own in parameters:
            aliases[own] = (*aliases.get(own, ()), name)
    found = DeepSpeedCheckpoint(files, first, parameters, aliases, buffers, fields)
    for rank in range(len(files.model)):
        _check_model(found, rank)
    return found


def _check_stage(files: CheckpointFiles, state: RankState) -> None:
    if state.ranks != len(files.optimizer):
        raise CheckpointError(
            f"{state.path}: saved by {state.ranks} ranks, but {files.path} holds {len(files.optimizer)} "
            "'*_optim_states.pt' files; some are missing, or left over from another run"
        )
    if (state.stage == 3) != files.model_by_rank:
        raise CheckpointError(
            f"{state.path}: is of stage {state.stage}, but {files.model[0].name} of stage "
            f"{'3' if files.model_by_rank else '1 or 2'}: files of two checkpoints are mixed in {files.path}"
        )


def _check_readable(fields: Fields, ranks: int) -> None:
    for key, what in _UNREADABLE.items():
        if fields.values.get(key) is not None:
            raise CheckpointError(f"{fields.path}: {key}: a checkpoint {what} cannot be imported")
    if fields.values.get("mp_world_size", 1) != 1:
        raise fields.error("mp_world_size", f"is {fields.values['mp_world_size']!r}: tensor parallelism")
    if fields.optional("dp_world_size", int) not in (None, ranks):
        raise CheckpointError(
            f"{fields.path}: saved by {fields.values['dp_world_size']} ranks, but there are {ranks} "
            "'*_optim_states.pt' files"
        )


def _check_model(checkpoint: DeepSpeedCheckpoint, rank: int) -> None:
    """A further rank's model file is of the same step, and has its part of the frozen parameters."""
    path = checkpoint.files.model[rank]
    steps, wanted = (
        Fields(read_pickled(path), path).count("global_steps"),
        checkpoint.fields.count("global_steps"),
    )
    if steps != wanted:
        raise CheckpointError(
            f"{path}: of step {steps}, {checkpoint.files.model[0].name} of step {wanted}: files of two "
            "checkpoints are mixed"
        )
    checkpoint._frozen_values(rank)


def _check_same(first: RankState, state: RankState) -> None:
    own, wanted = state.plain(), first.plain()
    for what, value in own.items():
        if value != wanted[what]:
            raise CheckpointError(
                f"{state.path}: {what}: {value!r:.200}; {first.path.name} has {wanted[what]!r:.200}: files "
                "of two checkpoints are mixed"
            )


def _trained(first: RankState, fields: Fields, sizes: list[list[int]]) -> dict[str, StoredParameter]:
    tables, module = fields.get("param_shapes", list), fields.inner("module")
    if len(tables) != len(first.masters):
        raise fields.error(
            "param_shapes", f"has {len(tables)} groups, {first.path.name} {len(first.masters)}"
        )
    found: dict[str, StoredParameter] = {}
    for flat, (table, group) in enumerate(zip(tables, first.flat_groups, strict=True)):
        shapes = fields.shapes("param_shapes", table)
        of_ranks = [size[flat] for size in sizes]
        try:
            if first.stage == 3:
                fragments = parted_layout(flat, shapes, of_ranks)
            else:
                gaps = [0] * len(shapes) if first.gaps is None else first.gaps[flat]
                fragments = joined_layout(flat, shapes, gaps, of_ranks)
        except ValueError as error:
            raise fields.error("param_shapes", f"does not fit the files beside it: {error}") from None
        for name, parts in fragments.items():
            if name in found:
                raise fields.error("param_shapes", f"lists {name!r} twice")
            dtype = _tensor(module, name).dtype if name in module.values else torch.float32
            found[name] = StoredParameter(shapes[name], dtype, group, tuple(parts))
    return found


def _round_robin(fields: Fields) -> bool:
    config = fields.values.get("ds_config")
    section = config.get("zero_optimization") if isinstance(config, dict) else None
    return isinstance(section, dict) and section.get("round_robin_gradients") is True


def _check_slices(
    files: CheckpointFiles,
    rank: int,
    table: list[dict[str, tuple[int, int]]],
    trained: Mapping[str, StoredParameter],
) -> None:
    """The addresses that the rank wrote down are those that the shapes give."""
    wanted: list[dict[str, tuple[int, int]]] = [{} for _ in table]
    for name, entry in trained.items():
        for part in entry.fragments:
            if part.rank == rank:
                wanted[part.flat][name] = (part.begin, part.numel)
    if table != wanted:
        flat = next(number for number, own in enumerate(table) if own != wanted[number])
        name = next(iter(dict(table[flat].items() ^ wanted[flat].items())))
        raise CheckpointError(
            f"{files.optimizer[rank]}: param_slice_mappings: {name!r} of group {flat} is at "
            f"{table[flat].get(name)} (begin, elements), by the shapes in {files.model[0].name} it is at "
            f"{wanted[flat].get(name)}: files of two checkpoints are mixed"
        )


def _frozen_fields(files: CheckpointFiles, fields: Fields) -> Fields:
    return fields.inner("frozen_param_fragments" if files.model_by_rank else "module")


def _frozen(files: CheckpointFiles, fields: Fields, known: set[str]) -> dict[str, StoredParameter]:
    if files.model_by_rank:
        shapes = fields.shapes("frozen_param_shapes", fields.optional("frozen_param_shapes", dict) or {})
    else:
        # All that the module holds and nobody else does: stage 1 writes no list of them.
        module = fields.inner("module")
        rest = {name: _tensor(module, name).shape for name in module.values if name not in known}
        shapes = fields.shapes("module", rest)
    found = {}
    for name, shape in shapes.items():
        dtype = _tensor(_frozen_fields(files, fields), name).dtype
        fragments = parted(math.prod(shape), len(files.model))
        found[name] = StoredParameter(shape, dtype, None, tuple(fragments))
    return found


def _shared(fields: Fields) -> dict[str, str]:
    found = fields.optional("shared_params", dict) or {}
    for name, first in found.items():
        if type(name) is not str or type(first) is not str:
            raise fields.error("shared_params", f"holds {name!r}: {first!r}, names wanted")
    return found


def _tensor(fields: Fields, name: str) -> torch.Tensor:
    value = fields.get(name, torch.Tensor)
    if value.dtype not in SAFETENSORS_CODES:
        raise fields.error(name, f"is {value.dtype}, which cannot be stored")
    return value


def _values(fields: Fields, name: str, numel: int) -> torch.Tensor:
    value = _tensor(fields, name).detach().contiguous().reshape(-1)
    if value.numel() < numel:
        raise fields.error(name, f"has {value.numel()} elements, {numel} wanted")
    return value[:numel]
