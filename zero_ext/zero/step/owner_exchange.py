"""Tensors made whole in the middle of a step on shards: each at one rank, its owner."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch

from zero_ext.comm import Collectives
from zero_ext.comm.pending_collective import PendingCollective
from zero_ext.optim import OwnedRange
from zero_ext.zero.units.flat_layout import ParameterSpec, in_memory_order
from zero_ext.zero.units.master_weights import MasterShard

Transform = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
Span = tuple[int, int]


class _OwnedTensor(NamedTuple):
    """A parameter of ``master``, and the elements of it that every rank has."""

    master: MasterShard
    spec: ParameterSpec
    owner: int
    spans: tuple[Span, ...]  # by rank, in memory order
    begin: int  # of this rank's elements, counted from the first one of its shard


def deal_owners(costs: Sequence[int], ranks: int) -> list[int]:
    """Return an owner for each cost: from the largest down, the rank that has the least so far.

    The same on every rank that asks the same. The largest sum of a rank exceeds the mean by less than one
    cost (Graham, "Bounds on multiprocessing timing anomalies", 1969).

    Args:
        costs: of each tensor.
        ranks: number of ranks.
    """
    loads, owners = [0] * ranks, [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        owners[index] = min(range(ranks), key=loads.__getitem__)
        loads[owners[index]] += costs[index]
    return owners


class OwnerExchange:
    """Sends slices of tensors from the ranks' shards to the tensors' owners, and results back.

    Ranks that have a whole tensor, because its optimizer state is not sharded, compute the result by
    themselves.

    Args:
        masters: the master shards of all units.
        cost: of computing the result for a tensor.
    """

    def __init__(self, masters: Sequence[MasterShard], cost: Callable[[ParameterSpec], int]) -> None:
        self._masters = masters
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

    def dealt_by(self, cost: Callable[[Sequence[int]], int]) -> OwnerExchange:
        """Return an exchange of the same tensors with owners by another ``cost`` of a tensor's shape."""
        return OwnerExchange(self._masters, lambda spec: cost(spec.shape))

    def own_tensors(self) -> dict[str, bool]:
        """Return the tensors that this rank owns by name, and whether all other ranks own them, too."""
        dealt = [
            (tensor.spec.name, tensor.owner == collectives.rank)
            for collectives, tensors in self._shared.items()
            for tensor in tensors
        ]
        return {name: False for name, own in dealt if own} | {spec.name: True for _, spec, _ in self._alone}

    def start(self, values: Mapping[OwnedRange, torch.Tensor], used: Collection[str]) -> TransformInFlight:
        """Begin to send slices to the owners; a collective, as are the calls of what it returns, which come
        in the order of these.

        Args:
            values: by master shard [n], of one dtype. They must not be changed until the end.
            used: names of the parameters, the same on all ranks.
        """
        alone = [each for each in self._alone if each[0] in values and each[1].name in used]
        sent = []
        for collectives, tensors in self._shared.items():
            chosen = [each for each in tensors if each.master in values and each.spec.name in used]
            if chosen:
                sent.append(_SlicesInFlight(collectives, chosen, values))
        return TransformInFlight(values, alone, sent)


class TransformInFlight:
    """Whole tensors that are on their way to their owners, or results on their way back."""

    def __init__(
        self,
        values: Mapping[OwnedRange, torch.Tensor],
        alone: Sequence[tuple[MasterShard, ParameterSpec, int]],
        sent: Sequence[_SlicesInFlight],
    ) -> None:
        self._values, self._alone, self._sent = values, alone, sent

    def apply(self, transform: Transform) -> None:
        """Wait for the tensors that this rank owns, and begin to send what ``transform`` makes of them.

        Args:
            transform: from tensors [shape] by name to others of the same names, shapes and dtype.
        """
        if self._alone:
            own = self._own()
            results = transform({spec.name: flat.as_strided(spec.shape, spec.stride) for flat, spec in own})
            for flat, spec in own:
                flat.copy_(in_memory_order(results[spec.name], spec))
        for each in self._sent:
            each.apply(transform)

    def full_tensors(self) -> dict[str, torch.Tensor]:
        """Wait for the tensors [shape] that this rank owns, and return them by name. Nothing is sent back."""
        found = {spec.name: flat.as_strided(spec.shape, spec.stride) for flat, spec in self._own()}
        for each in self._sent:
            found |= each.full_tensors()
        return found

    def _own(self) -> list[tuple[torch.Tensor, ParameterSpec]]:
        """Return the values of the tensors that this rank has in full."""
        spans = [(self._values[master], spec, offset) for master, spec, offset in self._alone]
        return [(values[offset : offset + spec.numel], spec) for values, spec, offset in spans]

    def finish(self) -> None:
        """Wait for the results, which replace the values. Elements of other parameters stay."""
        for each in self._sent:
            each.finish()


class _SlicesInFlight:
    """The slices of ``tensors``, sharded over the ranks of ``collectives``, sent to their owners."""

    def __init__(
        self,
        collectives: Collectives,
        tensors: Sequence[_OwnedTensor],
        values: Mapping[OwnedRange, torch.Tensor],
    ) -> None:
        rank, ranks = collectives.rank, range(collectives.world_size)
        self._collectives, self._tensors = collectives, tensors
        self._slices = [_own_slice(values, tensor, rank) for tensor in tensors]
        self._mine = [tensor for tensor in tensors if tensor.owner == rank]
        self._elements = sum(tensor.spec.numel for tensor in tensors)
        like = next(iter(values.values()))
        pairs = list(zip(tensors, self._slices, strict=True))
        self._sends = [
            torch.cat([like[:0], *(own for tensor, own in pairs if tensor.owner == owner)]) for owner in ranks
        ]
        self._receives = [
            self._sends[rank]
            if source == rank
            else like.new_empty(sum(_length(each.spans[source]) for each in self._mine))
            for source in ranks
        ]
        self._pending = self._exchange(self._receives, self._sends, "slices to their owners")

    def apply(self, transform: Transform) -> None:
        """See :meth:`TransformInFlight.apply`."""
        found = self._arrived()
        whole = self._joined(found)
        results = transform(whole) if whole else {}
        for tensor in self._mine:
            slices = found[tensor.spec.name]
            result = in_memory_order(results[tensor.spec.name], tensor.spec)
            for target, source in zip(slices, result.split([each.numel() for each in slices]), strict=True):
                target.copy_(source)
        self._pending = self._exchange(self._sends, self._receives, "results from their owners")

    def full_tensors(self) -> dict[str, torch.Tensor]:
        """See :meth:`TransformInFlight.full_tensors`."""
        return self._joined(self._arrived())

    def _arrived(self) -> dict[str, list[torch.Tensor]]:
        """Wait for the slices of the tensors that this rank owns, and return them by name."""
        self._pending.wait()
        ends = [0] * len(self._receives)
        found: dict[str, list[torch.Tensor]] = {}
        for tensor in self._mine:
            begins = list(ends)
            ends = [end + _length(span) for end, span in zip(ends, tensor.spans, strict=True)]
            found[tensor.spec.name] = [
                received[begin:end] for received, begin, end in zip(self._receives, begins, ends, strict=True)
            ]
        return found

    def _joined(self, found: Mapping[str, list[torch.Tensor]]) -> dict[str, torch.Tensor]:
        specs = {tensor.spec.name: tensor.spec for tensor in self._mine}
        return {
            name: torch.cat(slices).as_strided(specs[name].shape, specs[name].stride)
            for name, slices in found.items()
        }

    def finish(self) -> None:
        """See :meth:`TransformInFlight.finish`."""
        self._pending.wait()
        starts = [0] * len(self._sends)
        for tensor, own in zip(self._tensors, self._slices, strict=True):
            begin = starts[tensor.owner]
            starts[tensor.owner] = begin + own.numel()
            own.copy_(self._sends[tensor.owner][begin : begin + own.numel()])

    def _exchange(
        self, receives: Sequence[torch.Tensor], sends: Sequence[torch.Tensor], label: str
    ) -> PendingCollective:
        return self._collectives.exchange(receives, sends, "matrices", self._elements, label)


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
            first, last = shards[collectives.rank]
            begin = min(max(offset - first, 0), last - first)
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
