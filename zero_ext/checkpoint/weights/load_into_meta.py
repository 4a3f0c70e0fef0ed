"""Weights from safetensors into a model on the meta device: every rank reads what will be its shards."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from zero_ext.checkpoint.files.checkpoint_error import CheckpointError
from zero_ext.checkpoint.transfer.chunk_reader import Chunk, ChunkReader, Read
from zero_ext.checkpoint.weights.safetensors_files import WeightFiles, find_weights
from zero_ext.comm import Collectives
from zero_ext.comm.process_group import join_world, make_collectives
from zero_ext.config import ZeroConfig
from zero_ext.offload import STORAGE_ALIGNMENT, Birthplace, ShardHome
from zero_ext.zero.construction.build_units import accelerator_or_cpu
from zero_ext.zero.units.collective_errors import FailedTogether, together
from zero_ext.zero.units.flat_layout import ALIGNMENT_BYTES, FlatLayout, ParameterSpec
from zero_ext.zero.units.presharded import BornShard, refuse_pickling, set_born

CHUNK_BYTES = 2 << 20
_MOST_SHOWN = 5
_Result = TypeVar("_Result")
# From the tensors of the files to what they fill: names in the model by names in the files.
Naming = Callable[[WeightFiles], Mapping[str, str]]


def load_born(
    model: nn.Module,
    path: str | os.PathLike[str],
    config: ZeroConfig,
    naming: Naming,
    process_group: dist.ProcessGroup | None = None,
) -> tuple[list[str], list[str]]:
    """Gives the parameters and buffers of ``model``, which are on the meta device, values from safetensors; a
    collective.

    In stage 3 the parameters become what those of :class:`zero_ext.Init` are: each rank reads the bytes of
    its own shards, in pieces, into the tier that ``config`` names, and holds nothing else. In other stages,
    and on one rank that keeps parameters on the device, they are whole. Floating-point tensors are converted
    to the parameters' dtypes.

    Args:
        model: on the meta device, tied as it will be.
        path: what :func:`zero_ext.load_safetensors` takes.
        config: the configuration that ``prepare`` will get.
        naming: from the files found to names in the model by names in the files.
        process_group: the data-parallel ranks.

    Returns:
        First names of the parameters and buffers without values in the files, still on the meta device, and
        what the files have beside the model's.

    Raises:
        CheckpointError: a file is missing, damaged or hostile.
        ValueError: shapes or dtypes do not fit, or the files have nothing of the model.
        RuntimeError: another rank failed, or storage did. The model is to be built again.
    """
    with torch.device("cpu"):
        join_world(config.timeout_seconds)
        collectives = make_collectives(process_group, config.timeout_seconds)
        plan = _agreed(collectives, lambda: _Plan(model, find_weights(path), naming), "reading weight files")
        moving = config.offload.params != "device" or accelerator_or_cpu().type != "cpu"
        cuts = config.stage == 3 and (collectives.world_size > 1 or moving)
        place = Birthplace(config.offload, config.aio) if cuts else None
        _agreed(collectives, lambda: plan.fill(collectives, place), "loading weights into shards")
    return plan.missing, plan.unexpected


def _agreed(collectives: Collectives, action: Callable[[], _Result], what: str) -> _Result:
    try:
        return together(collectives, action, what, "Build the model again.")
    except FailedTogether as error:
        if isinstance(error.__cause__, CheckpointError | ValueError | TypeError):
            raise error.__cause__ from None
        raise


class _Target:
    """Where the values of one tensor go on this rank: ``numel`` of its elements, from ``start`` on."""

    def __init__(self, start: int, numel: int, dtype: torch.dtype, into: ShardHome | torch.Tensor) -> None:
        self.start, self.numel, self.dtype, self._into = start, numel, dtype, into

    def put(self, begin: int, values: torch.Tensor) -> None:
        """Stores ``values`` [n] as the elements from ``begin`` of this part on."""
        values = values.to(self.dtype)
        if isinstance(self._into, torch.Tensor):
            self._into[begin : begin + values.numel()].copy_(values)
        else:
            self._into.store(begin, values, "device").let_go()


class _Piece(NamedTuple):
    """Bytes of a file, elements of ``dtype``, that go to ``target`` from element ``begin`` on."""

    chunk: Chunk
    dtype: torch.dtype
    target: _Target
    begin: int


class _Plan:
    """The tensors of the files by the parameters and buffers they fill, checked."""

    def __init__(self, model: nn.Module, files: WeightFiles, naming: Naming) -> None:
        self._model, self._files = model, files
        self._places: dict[torch.Tensor, list[tuple[nn.Module, str]]] = {}
        names: dict[str, torch.Tensor] = {}
        firsts: dict[torch.Tensor, str] = {}
        for prefix, module in model.named_modules(remove_duplicate=False):
            kept = {
                key: buffer
                for key, buffer in module._buffers.items()
                if key not in module._non_persistent_buffers_set
            }
            for key, tensor in {**module._parameters, **kept}.items():
                if tensor is not None:
                    self._places.setdefault(tensor, []).append((module, key))
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
                f"{files.paths[0]}: none of its tensors belongs to {type(model).__name__}; it holds {seen}"
            )
        self.missing = [name for tensor, name in firsts.items() if tensor not in self._keys]
        _refuse([_misfit(firsts[tensor], tensor, files, key) for tensor, key in self._keys.items()])

    def fill(self, collectives: Collectives, place: Birthplace | None) -> None:
        """Reads this rank's part of everything, in the order of the files."""
        pieces: list[_Piece] = []
        made: list[tuple[torch.Tensor, torch.Tensor]] = []
        for tensor, key in self._keys.items():
            value, target = _born(tensor, collectives, place)
            made.append((tensor, value))
            file, (entry, offset) = self._files.tensors[key]
            size = entry.dtype.itemsize
            step = CHUNK_BYTES // size
            for begin in range(0, target.numel, step):
                count = min(step, target.numel - begin)
                chunk = Chunk(file, offset + (target.start + begin) * size, count * size, None, repr(key))
                pieces.append(_Piece(chunk, entry.dtype, target, begin))
        pieces.sort(key=lambda piece: piece.chunk[:2])
        with ChunkReader(self._files.paths) as reader:
            for arrived in reader.read([Read(piece.chunk, None) for piece in pieces]):
                piece = pieces[arrived.request]
                piece.target.put(piece.begin, arrived.data.view(piece.dtype))
        for tensor, value in made:
            for module, key in self._places[tensor]:
                if isinstance(tensor, nn.Parameter):
                    module._parameters[key] = value  # type: ignore[assignment]
                else:
                    module._buffers[key] = value


def _born(
    tensor: torch.Tensor, collectives: Collectives, place: Birthplace | None
) -> tuple[torch.Tensor, _Target]:
    """What takes the place of the meta ``tensor``, and where the values of this rank's part of it go."""
    if place is None or not isinstance(tensor, nn.Parameter):
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        target = _Target(0, whole.numel(), tensor.dtype, whole.view(-1))
        if not isinstance(tensor, nn.Parameter):
            return whole, target
        return nn.Parameter(whole, requires_grad=tensor.requires_grad), target
    stride = torch.empty(tensor.shape, device="meta").stride()
    spec = ParameterSpec("", tuple(tensor.shape), stride, tensor.dtype)
    alignment = STORAGE_ALIGNMENT if place.tier == "nvme" else ALIGNMENT_BYTES
    cut = FlatLayout.build([spec], collectives.world_size, alignment)
    begin, end = cut.shard_range(collectives.rank)
    home = place.home(end - begin, spec.dtype)
    own = max(0, min(end, spec.numel) - begin)
    born = BornShard(spec, cut, home, collectives)
    parameter = nn.Parameter(born.placeholder, requires_grad=tensor.requires_grad)
    set_born(parameter, born)
    refuse_pickling(parameter)
    return parameter, _Target(begin, own, spec.dtype, home)


def _misfit(name: str, target: torch.Tensor, files: WeightFiles, key: str) -> str | None:
    entry = files.tensors[key][1].entry
    if tuple(entry.shape) != tuple(target.shape):
        return f"'{name}' has shape {tuple(entry.shape)} in the files, the model's {tuple(target.shape)}"
    if entry.dtype != target.dtype and not (entry.dtype.is_floating_point and target.dtype.is_floating_point):
        return f"'{name}' is {entry.dtype} in the files, the model's {target.dtype}"
    return None


def _refuse(problems: list[str | None]) -> None:
    found = [problem for problem in problems if problem is not None]
    if found:
        left = len(found) - _MOST_SHOWN
        more = f"; and {left} more" if left > 0 else ""
        raise ValueError(f"the weights do not fit: {'; '.join(found[:_MOST_SHOWN])}{more}")
