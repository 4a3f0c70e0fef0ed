"""Tensors that an optimizer needs in full: their slices, and the elements of these that every rank has."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

from zero_ext.comm import Collectives
from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.optim import OwnedRange
from zero_ext.zero.tiling.tiled_module import FullTensorMap, TileSlice
from zero_ext.zero.units.dtensor_local import is_distributed, is_split
from zero_ext.zero.units.flat_layout import ParameterSpec, in_memory_order
from zero_ext.zero.units.master_weights import MasterShard
from zero_ext.zero.units.parameter_marks import expert_ranks

Span = tuple[int, int]


class HeldSlice(NamedTuple):
    """A parameter of this rank or of others that is a slice of a full tensor, or all of it."""

    name: str  # of the parameter
    where: TileSlice | None  # None: all of the tensor
    spans: tuple[Span, ...]  # the elements that each rank has, in the memory order of the parameter
    master: MasterShard | None  # None: only other ranks have the parameter
    begin: int  # of this rank's elements, counted from the first one of the master shard
    numel: int  # of this rank's elements


@dataclass(frozen=True, eq=False)
class SlicedTensor:
    """A full tensor ``spec``, in row-major order where it has several slices. What a rank sends of it are its
    elements of one slice after another.
    """

    spec: ParameterSpec  # with the name of a parameter that this rank has
    slices: tuple[HeldSlice, ...]

    def length(self, rank: int) -> int:
        """Return the number of elements that ``rank`` has."""
        return sum(last - first for first, last in (each.spans[rank] for each in self.slices))

    def used_slices(self, used: Collection[str]) -> list[HeldSlice]:
        """Return the slices that this rank has, if they are ``used``."""
        return [each for each in self.slices if each.master is not None and each.name in used]

    def is_stepped(self, values: Mapping[OwnedRange, torch.Tensor], used: Collection[str]) -> bool:
        """Return whether a step of the ``used`` parameters with ``values`` of master shards steps it."""
        present = [each.master in values for each in self.used_slices(used)]
        if any(present) and not all(present):
            raise zero_ext_bug(f"a step on some slices of '{self.spec.name}' without the others")
        return any(present)

    def own_slices(self, values: Mapping[OwnedRange, torch.Tensor]) -> list[torch.Tensor]:
        """Return views of this rank's elements in ``values``, by master shard [n]."""
        return [
            values[each.master].narrow(0, each.begin, each.numel)
            for each in self.slices
            if each.master is not None
        ]

    def assemble(self, received: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the full tensor [spec.shape], of the elements [length] that every rank has."""
        if len(received) == len(self.slices) == 1 and self.slices[0].where is None:
            return received[0].as_strided(self.spec.shape, self.spec.stride)
        full = received[0].new_empty(self.spec.numel)
        for each, elements in self._by_slice(received):
            flat = full if each.where is None else full.new_empty(math.prod(each.where.sizes))
            for (first, last), values in zip(each.spans, elements, strict=True):
                flat[first:last] = values
            if each.where is not None:
                each.where.view_in(full.view(each.where.shape)).copy_(flat.view(each.where.sizes))
        return full.as_strided(self.spec.shape, self.spec.stride)

    def disassemble(self, full: torch.Tensor, received: Sequence[torch.Tensor]) -> None:
        """Overwrite ``received`` of :meth:`assemble` by the elements of ``full`` [spec.shape]."""
        ordered = in_memory_order(full, self.spec)
        for each, elements in self._by_slice(received):
            flat = ordered
            if each.where is not None:
                flat = each.where.view_in(ordered.view(each.where.shape)).reshape(-1)
            for (first, last), values in zip(each.spans, elements, strict=True):
                values.copy_(flat[first:last])

    def _by_slice(self, received: Sequence[torch.Tensor]) -> Iterator[tuple[HeldSlice, list[torch.Tensor]]]:
        begins = [0] * len(received)
        for each in self.slices:
            ends = [begin + last - first for begin, (first, last) in zip(begins, each.spans, strict=True)]
            bounds = zip(received, begins, ends, strict=True)
            yield each, [values[begin:end] for values, begin, end in bounds]
            begins = ends


def full_shape(full_tensors: FullTensorMap, parameter: nn.Parameter, spec: ParameterSpec) -> tuple[int, ...]:
    """Return the shape of the full tensor that ``parameter`` is a slice of, its own if it is none."""
    if is_distributed(parameter):
        return tuple(parameter.shape)
    tile = full_tensors.tile_slice(spec.name)
    return spec.shape if tile is None else tile.shape


def sliced_tensors(
    masters: Sequence[MasterShard], full_tensors: FullTensorMap, collectives: Collectives
) -> dict[Collectives | None, list[SlicedTensor]]:
    """Return the full tensors of all parameters that an optimizer steps, by the ranks that have them.

    The order is the same on all of these ranks. None stands for tensors that this rank has in full, because
    their optimizer state is not sharded.

    Args:
        masters: the master shards of units.
        full_tensors: which parameters are slices.
        collectives: those of the data-parallel ranks.
    """
    holders = _Holders(collectives)
    specs: dict[str, ParameterSpec] = {}
    found: dict[Collectives | None, dict[str, list[HeldSlice]]] = defaultdict(lambda: defaultdict(list))
    for master in masters:
        layout, stepped = master.unit.layout, {segment.name for segment in master.segments}
        for spec, offset, parameter in zip(layout.specs, layout.offsets, master.unit.parameters, strict=True):
            if spec.name not in stepped:
                continue
            tile, full, split = full_tensors.tile_slice(spec.name), spec, is_split(parameter)
            if split and expert_ranks(parameter):
                # Ranks with other experts of a stack have other matrices, each of them in full.
                tile, split = None, False
            if tile is not None:
                shape = full_shape(full_tensors, parameter, spec)
                full = ParameterSpec(spec.name, shape, _row_major(shape), spec.dtype)
            group, ranks = holders.of(master, split)
            name = full_tensors.name(spec.name)
            specs.setdefault(name, full)
            found[group][name] += _slices_of(master, spec, offset, tile, ranks)
    return {
        group: [SlicedTensor(specs[name], tuple(slices)) for name, slices in tensors.items()]
        for group, tensors in found.items()
    }


class _Rank(NamedTuple):
    """A rank that has elements of the same tensors as this one."""

    shard: int  # number of its shard
    tensor: int  # its rank among the tensor-parallel ones


class _Ranks(NamedTuple):
    """Ranks that have all elements of some tensors, and the one that is this process's."""

    ranks: tuple[_Rank, ...]
    own: _Rank


class _Holders:
    """Finds the ranks that have the elements of a tensor: a unit's shards, of all its tensor-parallel slices
    if it is split. Ranks with the same elements, as without sharding, are in groups of their own.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._data, self._all = collectives, collectives.slices
        self._positions: list[tuple[int, int]] = []  # data-parallel and tensor-parallel rank
        self._groups: dict[tuple[int, ...], Collectives] = {}
        if self._all is not None:
            table = torch.zeros(self._all.world_size, 2, dtype=torch.int64, device="cpu")
            table[self._all.rank] = torch.tensor([collectives.rank, collectives.tensor_rank], device="cpu")
            self._all.sum_(table, "ranks that have slices of tensors")
            self._positions = [(data, tensor) for data, tensor in table.tolist()]

    def of(self, master: MasterShard, split: bool) -> tuple[Collectives | None, _Ranks]:
        """Return their collectives, None for this rank alone, and the ranks in the order of these."""
        sharded = master.unit.placement.optimizer and master.unit.collectives.world_size > 1
        shards = master.unit.collectives if sharded else None
        if not split or self._all is None:
            count, own = (shards.world_size, shards.rank) if shards is not None else (1, 0)
            return shards, _Ranks(tuple(_Rank(shard, 0) for shard in range(count)), _Rank(own, 0))
        data = [self._data.rank]
        if shards is not None:
            data = [self._data.ranks.index(rank) for rank in shards.ranks]
        members = tuple(rank for rank, (own, _) in enumerate(self._positions) if own in data)
        if members not in self._groups:
            everyone = len(members) == self._all.world_size
            self._groups[members] = self._all if everyone else self._all.among(members)
        positions = [self._positions[rank] for rank in members]
        ranks = tuple(_Rank(data.index(own), tensor) for own, tensor in positions)
        return self._groups[members], _Ranks(ranks, ranks[members.index(self._all.rank)])


def _slices_of(
    master: MasterShard, spec: ParameterSpec, offset: int, tile: TileSlice | None, holders: _Ranks
) -> list[HeldSlice]:
    """Return the slice that a parameter at ``offset`` of its unit is, and those of the tensor-parallel ranks,
    which have units of the same layout."""
    layout = master.unit.layout
    count = 1 + max(rank.shard for rank in holders.ranks)
    numel = layout.numel // count
    spans = [
        _overlap(number * numel - offset, (number + 1) * numel - offset, spec.numel)
        for number in range(count)
    ]
    first, last = spans[holders.own.shard]
    begin = max(offset - holders.own.shard * numel, 0) if first < last else 0
    slices = []
    for tensor in sorted({rank.tensor for rank in holders.ranks}):
        own = tensor == holders.own.tensor
        slices.append(
            HeldSlice(
                spec.name,
                tile if tile is None or own else _of_rank(tile, tensor),
                tuple(spans[rank.shard] if rank.tensor == tensor else (0, 0) for rank in holders.ranks),
                master if own else None,
                begin,
                last - first if own else 0,
            )
        )
    return slices


def _of_rank(tile: TileSlice, rank: int) -> TileSlice:
    """Return the slice of another tensor-parallel rank, of the same sizes."""
    offset = (rank * size if size < full else 0 for size, full in zip(tile.sizes, tile.shape, strict=True))
    return replace(tile, offset=tuple(offset))


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(tuple(shape), device="meta").stride()


def _overlap(first: int, last: int, numel: int) -> Span:
    """Return the elements [first, last) that are among [0, numel)."""
    begin = min(max(first, 0), numel)
    return begin, max(begin, min(last, numel))
