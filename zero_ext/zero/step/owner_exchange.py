"""Tensors made whole in the middle of a step on shards: each at one rank, its owner."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch

from zero_ext.comm import Collectives
from zero_ext.optim import OwnedRange
from zero_ext.zero.step.sliced_tensors import SlicedTensor
from zero_ext.zero.units.flat_layout import ParameterSpec

Transform = Callable[[str, torch.Tensor], torch.Tensor]


class _OwnedTensor(NamedTuple):
    """A tensor and the rank that owns it."""

    sliced: SlicedTensor
    owner: int


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
        tensors: those of each group of ranks, in the same order on all of them; of None those that this rank
            has in full.
        cost: of computing the result for a tensor.
    """

    def __init__(
        self,
        tensors: Mapping[Collectives | None, Sequence[SlicedTensor]],
        cost: Callable[[ParameterSpec], int],
    ) -> None:
        self._alone = tuple(tensors.get(None, ()))
        self._shared = {
            collectives: _dealt(collectives, chosen, cost)
            for collectives, chosen in tensors.items()
            if collectives is not None
        }

    def check_used(self, used: Collection[str]) -> None:
        """Raise ``RuntimeError`` if some slices of a tensor are ``used`` and others are not."""
        for tensor in [*self._alone, *(each.sliced for many in self._shared.values() for each in many)]:
            present = {each.name for each in tensor.slices if each.master is not None}
            missing = sorted(present.difference(used))
            if missing and len(missing) < len(present):
                raise RuntimeError(
                    f"parameter '{missing[0]}': expected a gradient, as other tiles of the same tensor have "
                    "one and the optimizer needs it in full, got none. Use all tiles of a layer, and freeze "
                    "all or none."
                )

    def apply(
        self, values: Mapping[OwnedRange, torch.Tensor], used: Collection[str], transform: Transform
    ) -> None:
        """Replace ``values`` by what ``transform`` makes of whole tensors; a collective.

        Args:
            values: by master shard [n], of one dtype. Elements of other parameters stay.
            used: names of the parameters, the same on all ranks.
            transform: from name and tensor [shape] to a tensor of the same shape and dtype.
        """
        for tensor in self._alone:
            if tensor.is_stepped(values, used):
                own = tensor.own_slices(values)
                elements = own[0] if len(own) == 1 else torch.cat(own)
                tensor.disassemble(transform(tensor.spec.name, tensor.assemble([elements])), [elements])
                if len(own) > 1:
                    _copy_to(own, elements)
        for collectives, tensors in self._shared.items():
            chosen = [each for each in tensors if each.sliced.is_stepped(values, used)]
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
        slices = [each.sliced.own_slices(values) for each in tensors]
        mine = [each.sliced for each in tensors if each.owner == rank]
        sends = [
            torch.cat(
                [
                    like[:0],
                    *(
                        own
                        for each, many in zip(tensors, slices, strict=True)
                        for own in many
                        if each.owner == owner
                    ),
                ]
            )
            for owner in ranks
        ]
        receives = [
            sends[rank] if source == rank else like.new_empty(sum(each.length(source) for each in mine))
            for source in ranks
        ]
        elements = sum(each.sliced.spec.numel for each in tensors)
        collectives.exchange(receives, sends, "matrices", elements, "slices to their owners").wait()
        ends = [0] * len(ranks)
        for tensor in mine:
            begins = ends
            ends = [begin + tensor.length(source) for source, begin in zip(ranks, begins, strict=True)]
            found = [values[begin:end] for values, begin, end in zip(receives, begins, ends, strict=True)]
            tensor.disassemble(transform(tensor.spec.name, tensor.assemble(found)), found)
        collectives.exchange(sends, receives, "matrices", elements, "results from their owners").wait()
        starts = [0] * len(ranks)
        for (_, owner), own in zip(tensors, slices, strict=True):
            begin = starts[owner]
            starts[owner] = _copy_to(own, sends[owner], begin)


def _dealt(
    collectives: Collectives, tensors: Sequence[SlicedTensor], cost: Callable[[ParameterSpec], int]
) -> list[_OwnedTensor]:
    owners = deal_owners([cost(each.spec) for each in tensors], collectives.world_size)
    return [_OwnedTensor(*pair) for pair in zip(tensors, owners, strict=True)]


def _copy_to(targets: Sequence[torch.Tensor], source: torch.Tensor, begin: int = 0) -> int:
    """Fill ``targets`` one after another with the elements of ``source`` from ``begin`` on. Return the end."""
    for target in targets:
        end = begin + target.numel()
        target.copy_(source[begin:end])
        begin = end
    return begin
