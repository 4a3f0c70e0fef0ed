"""Tensors made whole in the middle of a step on shards: each at one rank, its owner."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch

from zero_ext.comm import Collectives
from zero_ext.config.full_tensor_costs import deal_owners
from zero_ext.optim import OwnedRange
from zero_ext.zero.units.flat_layout import ParameterSpec, in_memory_order
from zero_ext.zero.units.master_weights import MasterShard

Transform = Callable[[str, torch.Tensor], torch.Tensor]
Span = tuple[int, int]


class _OwnedTensor(NamedTuple):
    """A parameter of ``master``, and the elements of it that every rank has."""

    master: MasterShard
    spec: ParameterSpec
    owner: int
    spans: tuple[Span, ...]  # by rank, in memory order
    begin: int  # of this rank's elements, counted from the first one of its shard


class OwnerExchange:
    """Sends slices of tensors from the ranks' shards to the tensors' owners, and results back.

    Ranks that have a whole tensor, because its optimizer state is not sharded, compute the result by
    themselves.

    Args:
        masters: the master shards of all units.
        cost: of computing the result for a tensor.
    """

    def __init__(self, masters: Sequence[MasterShard], cost: Callable[[ParameterSpec], int]) -> None:
        self._alone: list[tuple[MasterShard, ParameterSpec, int]] = []
        sharded: dict[Collectives, list[MasterShard]] = defaultdict(list)
        for master in masters:
            if master.unit.placement.optimizer and master.unit.collectives.world_size > 1:
                sharded[master.unit.collectives].append(master)
                continue
            layout = master.unit.layout
            self._alone += [(master, *pair) for pair in zip(layout.specs, layout.offsets, strict=True)]
        self._shared = {
            collectives: _dealt(collectives, chosen, cost) for collectives, chosen in sharded.items()
        }

    def apply(
        self, values: Mapping[OwnedRange, torch.Tensor], used: Collection[str], transform: Transform
    ) -> None:
        """Replace ``values`` by what ``transform`` makes of whole tensors; a collective.

        Args:
            values: by master shard [n], of one dtype. Elements of other parameters stay.
            used: names of the parameters, the same on all ranks.
            transform: from name and tensor [shape] to a tensor of the same shape and dtype.
        """
        for master, spec, offset in self._alone:
            if spec.name in used and master in values:
                own = values[master][offset : offset + spec.numel]
                own.copy_(
                    in_memory_order(transform(spec.name, own.as_strided(spec.shape, spec.stride)), spec)
                )
        for collectives, tensors in self._shared.items():
            chosen = [each for each in tensors if each.master in values and each.spec.name in used]
            if chosen:
                self._apply_at_owners(collectives, chosen, values, transform)

    def _apply_at_owners(
        self,
        collectives: Collectives,
        tensors: Sequence[_OwnedTensor],
        values: Mapping[OwnedRange, torch.Tensor],
        transform: Transform,
    ) -> None:
        rank, ranks = collectives.rank, range(collectives.world_size)
        like = next(iter(values.values()))
        slices = {id(tensor): _own_slice(values, tensor, rank) for tensor in tensors}
        mine = [tensor for tensor in tensors if tensor.owner == rank]
        sends = [
            torch.cat([like[:0], *(slices[id(tensor)] for tensor in tensors if tensor.owner == owner)])
            for owner in ranks
        ]
        receives = [
            sends[rank]
            if source == rank
            else like.new_empty(sum(_length(each.spans[source]) for each in mine))
            for source in ranks
        ]
        elements = sum(tensor.spec.numel for tensor in tensors)
        collectives.exchange(receives, sends, "matrices", elements, "slices to their owners").wait()
        ends = [0] * len(ranks)
        for tensor in mine:
            begins = list(ends)
            ends = [end + _length(span) for end, span in zip(ends, tensor.spans, strict=True)]
            found = [receives[source][begins[source] : ends[source]] for source in ranks]
            whole = torch.cat(found).as_strided(tensor.spec.shape, tensor.spec.stride)
            result = in_memory_order(transform(tensor.spec.name, whole), tensor.spec)
            for target, (first, last) in zip(found, tensor.spans, strict=True):
                target.copy_(result[first:last])
        collectives.exchange(sends, receives, "matrices", elements, "results from their owners").wait()
        starts = [0] * len(ranks)
        for tensor in tensors:
            own = slices[id(tensor)]
            begin = starts[tensor.owner]
            starts[tensor.owner] = begin + own.numel()
            own.copy_(sends[tensor.owner][begin : begin + own.numel()])


def _dealt(
    collectives: Collectives, masters: Sequence[MasterShard], cost: Callable[[ParameterSpec], int]
) -> list[_OwnedTensor]:
    specs = [spec for master in masters for spec in master.unit.layout.specs]
    owners = iter(deal_owners([cost(spec) for spec in specs], collectives.world_size))
    tensors = []
    for master in masters:
        layout = master.unit.layout
        shards = [layout.shard_range(rank) for rank in range(collectives.world_size)]
        for spec, offset in zip(layout.specs, layout.offsets, strict=True):
            spans = tuple(_overlap(first - offset, last - offset, spec.numel) for first, last in shards)
            begin = min(max(offset - shards[collectives.rank][0], 0), layout.shard_numel)
            tensors.append(_OwnedTensor(master, spec, next(owners), spans, begin))
    return tensors


def _own_slice(values: Mapping[OwnedRange, torch.Tensor], tensor: _OwnedTensor, rank: int) -> torch.Tensor:
    return values[tensor.master].narrow(0, tensor.begin, _length(tensor.spans[rank]))


def _overlap(first: int, last: int, numel: int) -> Span:
    """Return the elements [first, last) that are among [0, numel)."""
    begin = min(max(first, 0), numel)
    return begin, max(begin, min(last, numel))


def _length(span: Span) -> int:
    return span[1] - span[0]
