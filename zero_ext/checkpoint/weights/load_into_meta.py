"""Weights from safetensors into a model on the meta device: every rank reads what will be its shards."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from zero_ext.checkpoint.chunk_reader import Chunk, ChunkReader, ChunkRequest
from zero_ext.checkpoint.files import CheckpointError
from zero_ext.checkpoint.format.tensor_files import WeightFiles, find_weights, row_major
from zero_ext.checkpoint.load_plan import refuse_misfits
from zero_ext.checkpoint.weights.fill_weights import misfits
from zero_ext.comm import Collectives
from zero_ext.comm.process_group import join_world, make_collectives
from zero_ext.config import ZeroConfig
from zero_ext.config.tiers import TIERS
from zero_ext.offload import InitStorage, ShardStorage
from zero_ext.zero.construction.build_units import accelerator_or_cpu
from zero_ext.zero.units.collective_errors import CollectiveError, raise_on_all_ranks
from zero_ext.zero.units.flat_layout import FlatLayout, ParameterSpec
from zero_ext.zero.units.presharded import PreshardedParameter, refuse_pickling, set_presharded

CHUNK_BYTES = 2 << 20
_MOST_SHOWN = 5
_Result = TypeVar("_Result")
# From the tensors of the files to what they fill: names in the model by names in the files.
Naming = Callable[[WeightFiles], Mapping[str, str]]


def load_into_meta(
    model: nn.Module,
    path: str | os.PathLike[str],
    config: ZeroConfig,
    naming: Naming,
    process_group: dist.ProcessGroup | None = None,
) -> tuple[list[str], list[str]]:
    """Give the parameters and buffers of ``model``, which are on the meta device, values from safetensors; a
    collective.

    In stage 3 the parameters become what those of :class:`zero_ext.Init` are: each rank reads the bytes of
    its own shards, in chunks, into the tier that ``config`` names, and holds nothing else. In other stages,
    and on one rank that keeps parameters on the device, they are full tensors. Floating-point tensors are
    converted to the parameters' dtypes.

    ``path`` has safetensors as :func:`zero_ext.load_weights` takes them, ``config`` is for ``prepare``,
    ``naming`` leads from the files found to names in the model by names in the files. Returns the first
    names of the parameters and buffers without values in the files, still on the meta device, and what the
    files have besides the model's. CheckpointError if a file is missing, damaged or hostile, ValueError if
    shapes or dtypes do not fit or the files have nothing of the model, RuntimeError if another rank or
    storage failed. The model is to be built again then.
    """
    with torch.device("cpu"):
        join_world(config.timeout_seconds)
        collectives = make_collectives(process_group, config.timeout_seconds)
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


class _ChunkTarget(NamedTuple):
    """Bytes of a file, elements of ``dtype``, that go to ``target`` from element ``begin`` on."""

    chunk: Chunk
    dtype: torch.dtype
    target: _Target
    begin: int


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
        self._keys: dict[torch.Tensor, str] = {}
        named = naming(files)
        for key, name in named.items():
            if name in names:
                self._keys[names[name]] = key
        self.unexpected = [key for key, name in named.items() if name not in names]
        if not self._keys:
            seen = ", ".join(list(files.tensors)[:_MOST_SHOWN]) or "nothing"
            raise ValueError(
                f"{files.paths[0]}: expected tensors of {type(model).__name__}, got {seen}. Load the files "
                "of this model."
            )
        self.missing = [name for tensor, name in firsts.items() if tensor not in self._keys]
        problems = [
            problem
            for tensor, key in self._keys.items()
            for entry in [files.tensors[key][1].entry]
            for problem in misfits(firsts[tensor], tensor.shape, tensor.dtype, entry.shape, entry.dtype)
        ]
        refuse_misfits("weights: they do not fit the model", problems, "Load the files of this model.")

    def fill(self, collectives: Collectives, init_storage: InitStorage | None) -> None:
        """Read this rank's slice of every tensor, in the order of the files."""
        chunk_targets: list[_ChunkTarget] = []
        made: list[tuple[torch.Tensor, torch.Tensor]] = []
        for tensor, key in self._keys.items():
            value, target = _allocate(tensor, collectives, init_storage)
            made.append((tensor, value))
            file, (entry, offset) = self._files.tensors[key]
            size = entry.dtype.itemsize
            step = CHUNK_BYTES // size
            for begin in range(0, target.numel, step):
                count = min(step, target.numel - begin)
                chunk = Chunk(file, offset + (target.start + begin) * size, count * size, None, repr(key))
                chunk_targets.append(_ChunkTarget(chunk, entry.dtype, target, begin))
        chunk_targets.sort(key=lambda chunk_target: chunk_target.chunk[:2])
        with ChunkReader(self._files.paths) as reader:
            requests = [ChunkRequest(chunk_target.chunk, None) for chunk_target in chunk_targets]
            for number, data in reader.verified(requests):
                _, dtype, target, begin = chunk_targets[number]
                target.put(begin, data.view(dtype))
        for tensor, value in made:
            for module, key in self._owners[tensor]:
                if isinstance(tensor, nn.Parameter):
                    module._parameters[key] = value  # type: ignore[assignment]
                else:
                    module._buffers[key] = value


def _allocate(
    tensor: torch.Tensor, collectives: Collectives, init_storage: InitStorage | None
) -> tuple[torch.Tensor, _Target]:
    """Return what takes the place of the meta ``tensor``, and where the values of this rank's slice go."""
    if init_storage is None or not isinstance(tensor, nn.Parameter):
        full = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        target = _Target(0, full.numel(), tensor.dtype, full.view(-1))
        if not isinstance(tensor, nn.Parameter):
            return full, target
        return nn.Parameter(full, requires_grad=tensor.requires_grad), target
    spec = ParameterSpec("", tuple(tensor.shape), row_major(tensor.shape), tensor.dtype)
    alignment = TIERS[init_storage.tier].alignment
    layout = FlatLayout.build([spec], collectives.world_size, alignment)
    begin, end = layout.shard_range(collectives.rank)
    storage = init_storage.allocate(end - begin, spec.dtype)
    own = max(0, min(end, spec.numel) - begin)
    presharded = PreshardedParameter(spec, layout, storage, collectives)
    parameter = nn.Parameter(presharded.placeholder, requires_grad=tensor.requires_grad)
    set_presharded(parameter, presharded)
    refuse_pickling(parameter)
    return parameter, _Target(begin, own, spec.dtype, storage)
