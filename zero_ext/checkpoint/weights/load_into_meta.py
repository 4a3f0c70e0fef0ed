"""Weights from safetensors into a model on the meta device: every rank reads what will be its shards."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zero_ext.checkpoint.chunk_reader import ChunkReader, ChunkRequest
from zero_ext.checkpoint.files import CheckpointError
from zero_ext.checkpoint.format.tensor_files import WeightFiles, find_weights, row_major
from zero_ext.checkpoint.load_plan import refuse_misfits
from zero_ext.checkpoint.weights.block_map import BlockMap
from zero_ext.checkpoint.weights.block_reads import RangeRead, plan_reads
from zero_ext.checkpoint.weights.fill_weights import misfits
from zero_ext.comm import Collectives
from zero_ext.comm.process_group import join_world, make_collectives
from zero_ext.config import ZeroConfig
from zero_ext.config.tiers import TIERS
from zero_ext.offload import InitStorage, ShardStorage
from zero_ext.zero.construction.build_units import accelerator_or_cpu
from zero_ext.zero.units.collective_errors import CollectiveError, raise_on_all_ranks
from zero_ext.zero.units.dtensor_local import is_distributed, like_parameter, local_tensor
from zero_ext.zero.units.flat_layout import FlatLayout, ParameterSpec
from zero_ext.zero.units.parameter_marks import expert_ranks, restore_expert_marks
from zero_ext.zero.units.presharded import PreshardedParameter, refuse_pickling, set_presharded
from zero_ext.zero.units.rank_groups import rank_groups

_MOST_SHOWN = 5
_Result = TypeVar("_Result")


class NamedTensors(NamedTuple):
    """Tensors by their names in a model, as they are assembled from tensors of files, and the names of those
    that belong to no tensor of the model."""

    tensors: Mapping[str, BlockMap]
    unexpected: list[str]


Naming = Callable[[WeightFiles], NamedTensors]


def load_into_meta(
    model: nn.Module,
    path: str | os.PathLike[str],
    config: ZeroConfig,
    naming: Naming,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
) -> tuple[list[str], list[str]]:
    """Give the parameters and buffers of ``model``, which are on the meta device, values from safetensors; a
    collective.

    In stage 3 the parameters become what those of :class:`zero_ext.Init` are: each rank reads the bytes of
    its own shards, in chunks, into the tier that ``config`` names, and holds nothing else. In other stages,
    and on one rank that keeps parameters on the device, they are full tensors. Floating-point tensors are
    converted to the parameters' dtypes. Of experts that are spread over ``process_group``, a mesh, each rank
    reads its own.

    ``path`` has safetensors as :func:`zero_ext.load_weights` takes them, ``config`` is for ``prepare``,
    ``naming`` leads from the files found to tensors by their names in the model, each of one tensor of the
    files or assembled from several. Returns the first names of the parameters and buffers without values in
    the files, still on the meta device, and what the files have besides the model's. CheckpointError if a
    file is missing, damaged or hostile, ValueError if shapes or dtypes do not fit or the files have nothing
    of the model, RuntimeError if another rank or storage failed. The model is to be built again then.
    """
    with torch.device("cpu"):
        join_world(config.timeout_seconds)
        groups = rank_groups(process_group)
        collectives = make_collectives(groups.data, config.timeout_seconds)
        if groups.same_experts:
            collectives.join_experts(groups.same_experts)
        plan = _agreed(collectives, lambda: _Plan(model, find_weights(path), naming), "reading weight files")
        moving = config.offload.params != "device" or accelerator_or_cpu().type != "cpu"
        cuts = config.stage == 3 and (collectives.world_size > 1 or moving)
        init_storage = InitStorage(config.offload, config.aio) if cuts else None
        _agreed(collectives, lambda: plan.fill(collectives, init_storage), "loading weights into shards")
    return plan.missing, plan.unexpected


def _agreed(collectives: Collectives, action: Callable[[], _Result], what: str) -> _Result:
    try:
        return raise_on_all_ranks(collectives, action, what, "Build the model again.")
    except CollectiveError as error:
        if isinstance(error.__cause__, CheckpointError | ValueError | TypeError):
            raise error.__cause__ from None
        raise


class _Target:
    """The destination of ``numel`` elements of one tensor, from ``start`` on, on this rank."""

    def __init__(self, start: int, numel: int, dtype: torch.dtype, into: ShardStorage | torch.Tensor) -> None:
        self.start, self.numel, self.dtype, self._into = start, numel, dtype, into

    def put(self, begin: int, values: torch.Tensor) -> None:
        """Store ``values`` [n] as the elements from ``begin`` of this slice on."""
        values = values.to(self.dtype)
        if isinstance(self._into, torch.Tensor):
            self._into[begin : begin + values.numel()].copy_(values)
        else:
            self._into.store(begin, values, "device").wait_source()


class _Plan:
    """The tensors of the files by the parameters and buffers they fill, checked."""

    def __init__(self, model: nn.Module, files: WeightFiles, naming: Naming) -> None:
        self._model, self._files = model, files
        self._owners: dict[torch.Tensor, list[tuple[nn.Module, str]]] = {}
        names: dict[str, torch.Tensor] = {}
        firsts: dict[torch.Tensor, str] = {}
        for prefix, module in model.named_modules(remove_duplicate=False):
            persistent = {
                key: buffer
                for key, buffer in module._buffers.items()
                if key not in module._non_persistent_buffers_set
            }
            for key, tensor in {**module._parameters, **persistent}.items():
                if tensor is not None:
                    self._owners.setdefault(tensor, []).append((module, key))
                    name = f"{prefix}.{key}" if prefix else key
                    names[name] = tensor
                    firsts.setdefault(tensor, name)
        self._sources: dict[torch.Tensor, BlockMap] = {}
        named = naming(files)
        self.unexpected = list(named.unexpected)
        for name, blocks in named.tensors.items():
            if name in names:
                self._sources[names[name]] = blocks
            else:
                self.unexpected += blocks.keys
        if not self._sources:
            seen = ", ".join(list(files.tensors)[:_MOST_SHOWN]) or "nothing"
            raise ValueError(
                f"{files.paths[0]}: expected tensors of {type(model).__name__}, got {seen}. Load the files "
                "of this model."
            )
        self.missing = [name for tensor, name in firsts.items() if tensor not in self._sources]
        problems = [
            problem
            for tensor, blocks in self._sources.items()
            for stored in dict.fromkeys(files.tensors[key][1].entry.dtype for key in blocks.keys)
            for problem in misfits(firsts[tensor], tensor.shape, tensor.dtype, blocks.shape, stored)
        ]
        # Initialized on each rank by itself, they would not be those of one process.
        problems += [
            f"{firsts[tensor]!r}: expected it in the files, as its experts are spread over ranks, got none"
            for tensor in firsts
            if tensor not in self._sources and is_distributed(tensor)
        ]
        refuse_misfits("weights: they do not fit the model", problems, "Load the files of this model.")

    def fill(self, collectives: Collectives, init_storage: InitStorage | None) -> None:
        """Read this rank's slice of every tensor, in the order of the files."""
        reads: list[tuple[RangeRead, _Target]] = []
        made: list[tuple[torch.Tensor, torch.Tensor]] = []
        for tensor, blocks in self._sources.items():
            value, target = _allocate(tensor, collectives, init_storage)
            made.append((tensor, value))
            own = _own_experts(tensor, blocks)
            reads += ((each, target) for each in plan_reads(self._files, own, target.start, target.numel))
        reads.sort(key=lambda each: each[0].copies[0].chunk[:2])
        requests = [ChunkRequest(copy.chunk, None) for read, _ in reads for copy in read.copies]
        with ChunkReader(self._files.paths) as reader:
            data: Iterator[torch.Tensor] = (each for _, each in reader.verified(requests))
            for read, target in reads:
                target.put(read.begin, read.values(data, target.dtype))
        for tensor, value in made:
            for module, key in self._owners[tensor]:
                if isinstance(tensor, nn.Parameter):
                    module._parameters[key] = value  # type: ignore[assignment]
                else:
                    module._buffers[key] = value
        restore_expert_marks(self._model)


def _own_experts(tensor: torch.Tensor, blocks: BlockMap) -> BlockMap:
    """Return the blocks of this rank's experts, if ``tensor`` stacks some that are spread over ranks."""
    if not is_distributed(tensor):
        return blocks
    count = local_tensor(tensor).shape[0]
    return blocks.narrowed(0, count * tensor.device_mesh.get_local_rank(), count)


def _allocate(
    tensor: torch.Tensor, collectives: Collectives, init_storage: InitStorage | None
) -> tuple[torch.Tensor, _Target]:
    """Return what takes the place of the meta ``tensor``, and where the values of this rank's slice go."""
    shape, device = local_tensor(tensor).shape, "cpu"
    if is_distributed(tensor):
        device = tensor.device_mesh.device_type  # where DTensor would move what is made on the host
    if init_storage is None or not isinstance(tensor, nn.Parameter):
        full = torch.empty(shape, dtype=tensor.dtype, device=device)
        target = _Target(0, full.numel(), tensor.dtype, full.view(-1))
        if not isinstance(tensor, nn.Parameter):
            return full, target
        return nn.Parameter(like_parameter(tensor, full), requires_grad=tensor.requires_grad), target
    holders = collectives.holders(bool(expert_ranks(tensor)))
    spec = ParameterSpec("", tuple(shape), row_major(shape), tensor.dtype)
    alignment = TIERS[init_storage.tier].alignment
    layout = FlatLayout.build([spec], holders.world_size, alignment)
    begin, end = layout.shard_range(holders.rank)
    storage = init_storage.allocate(end - begin, spec.dtype)
    own = max(0, min(end, spec.numel) - begin)
    presharded = PreshardedParameter(spec, layout, storage, holders, device=device)
    value = like_parameter(tensor, presharded.placeholder)
    parameter = nn.Parameter(value, requires_grad=tensor.requires_grad)
    set_presharded(parameter, presharded)
    refuse_pickling(parameter)
    return parameter, _Target(begin, own, spec.dtype, storage)
