"""Tensors made whole in the middle of a step on shards: each at one rank, its owner."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from zero_ext.comm import Collectives
from zero_ext.comm.pending_collective import PendingCollective
from zero_ext.config.full_tensor_costs import deal_owners
from zero_ext.optim import OwnedRange
from zero_ext.zero.step.sliced_tensors import SlicedTensor
from zero_ext.zero.units.flat_layout import ParameterSpec

Transform = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]


class _OwnedTensor(NamedTuple):
    """A tensor and the rank that owns it."""

    sliced: SlicedTensor
    owner: int


class OwnerExchange:
    """Sends slices of tensors from the ranks' shards to the tensors' owners, and results back.

    Ranks that have a whole tensor, because its optimizer state is not sharded, compute the result by
    themselves.

    Args:
        tensors: those of each group of ranks, in the same order on all of them; of None those that this rank
            has in full.
        cost: of computing the result for a tensor.
        in_host_memory: whether tensors travel there, as collectives on a thread of its own do.
    """

    def __init__(
        self,
        tensors: Mapping[Collectives | None, Sequence[SlicedTensor]],
        cost: Callable[[ParameterSpec], int],
        in_host_memory: bool = False,
    ) -> None:
        self._tensors = tensors
        self.in_host_memory = in_host_memory
        self._alone = tuple(tensors.get(None, ()))
        self._shared = {
            collectives: _dealt(collectives, chosen, cost)
            for collectives, chosen in tensors.items()
            if collectives is not None
        }
        self._related = _related(tensor for many in tensors.values() for tensor in many)

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

    def related(self, owned: OwnedRange) -> frozenset[OwnedRange]:
        """Return the ranges that have slices of the same tensors as ``owned``, which is one of them."""
        return self._related.get(owned, frozenset((owned,)))

    def dealt_by(self, cost: Callable[[Sequence[int]], int]) -> OwnerExchange:
        """Return an exchange of the same tensors with owners by another ``cost`` of a tensor's shape."""
        return OwnerExchange(self._tensors, lambda spec: cost(spec.shape), self.in_host_memory)

    def own_tensors(self) -> dict[str, bool]:
        """Return the tensors that this rank owns by name, and whether all other ranks own them, too."""
        dealt = [
            (tensor.sliced.spec.name, tensor.owner == collectives.rank)
            for collectives, tensors in self._shared.items()
            for tensor in tensors
        ]
        alone = {tensor.spec.name: True for tensor in self._alone}
        return {name: False for name, own in dealt if own} | alone

    def start(self, values: Mapping[OwnedRange, torch.Tensor], used: Collection[str]) -> TransformInFlight:
        """Begin to send slices to the owners; a collective, as are the calls of what it returns, which come
        in the order of these.

        Args:
            values: by master shard [n], of one dtype. They must not be changed until the end.
            used: names of the parameters, the same on all ranks.
        """
        alone = [tensor for tensor in self._alone if tensor.is_stepped(values, used)]
        sent = []
        for collectives, tensors in self._shared.items():
            chosen = [each for each in tensors if each.sliced.is_stepped(values, used)]
            if chosen:
                sent.append(_SlicesInFlight(collectives, chosen, values))
        return TransformInFlight(values, alone, sent)


class TransformInFlight:
    """Whole tensors that are on their way to their owners, or results on their way back."""

    def __init__(
        self,
        values: Mapping[OwnedRange, torch.Tensor],
        alone: Sequence[SlicedTensor],
        sent: Sequence[_SlicesInFlight],
    ) -> None:
        self._values, self._alone, self._sent = values, alone, sent

    def apply(self, transform: Transform) -> None:
        """Wait for the tensors that this rank owns, and replace them by what ``transform`` makes of them.

        Args:
            transform: from tensors [shape] by name to others of the same names, shapes and dtype.
        """
        own = {tensor.spec.name: tensor.own_slices(self._values) for tensor in self._alone}
        flat = {name: many[0] if len(many) == 1 else torch.cat(many) for name, many in own.items()}
        _transform(transform, [(tensor, [flat[tensor.spec.name]]) for tensor in self._alone])
        for name, many in own.items():
            if len(many) > 1:
                _copy_to(many, flat[name])
        for each in self._sent:
            each.apply(transform)

    def full_tensors(self) -> dict[str, torch.Tensor]:
        """Wait for the tensors [shape] that this rank owns, and return them by name. Nothing is sent back."""
        found = {}
        for tensor in self._alone:
            own = tensor.own_slices(self._values)
            found[tensor.spec.name] = tensor.assemble([own[0] if len(own) == 1 else torch.cat(own)])
        for each in self._sent:
            found |= each.full_tensors()
        return found

    def send_results(self) -> None:
        """Begin to send the results to the ranks that have slices of the tensors."""
        for each in self._sent:
            each.send_results()

    def finish(self) -> None:
        """Wait for the results, which replace the values. Elements of other parameters stay."""
        for each in self._sent:
            each.finish()


class _SlicesInFlight:
    """The elements of ``tensors`` that the ranks of ``collectives`` have, sent to the owners."""

    def __init__(
        self,
        collectives: Collectives,
        tensors: Sequence[_OwnedTensor],
        values: Mapping[OwnedRange, torch.Tensor],
    ) -> None:
        rank, ranks = collectives.rank, range(collectives.world_size)
        self._collectives = collectives
        self._slices = [(each.owner, each.sliced.own_slices(values)) for each in tensors]
        self._mine = [each.sliced for each in tensors if each.owner == rank]
        self._elements = sum(each.sliced.spec.numel for each in tensors)
        like = next(iter(values.values()))
        self._sends = [
            torch.cat([like[:0], *(own for owner, many in self._slices if owner == target for own in many)])
            for target in ranks
        ]
        self._receives = [
            self._sends[rank]
            if source == rank
            else like.new_empty(sum(each.length(source) for each in self._mine))
            for source in ranks
        ]
        self._pending = self._exchange(self._receives, self._sends, "slices to their owners")

    def apply(self, transform: Transform) -> None:
        """See :meth:`TransformInFlight.apply`."""
        _transform(transform, self._arrived())

    def send_results(self) -> None:
        """See :meth:`TransformInFlight.send_results`."""
        self._pending = self._exchange(self._sends, self._receives, "results from their owners")

    def full_tensors(self) -> dict[str, torch.Tensor]:
        """See :meth:`TransformInFlight.full_tensors`."""
        return {tensor.spec.name: tensor.assemble(elements) for tensor, elements in self._arrived()}

    def _arrived(self) -> list[tuple[SlicedTensor, list[torch.Tensor]]]:
        """Wait for the tensors that this rank owns, and return each with its elements by rank."""
        self._pending.wait()
        ends = [0] * len(self._receives)
        found = []
        for tensor in self._mine:
            begins = ends
            ends = [begin + tensor.length(source) for source, begin in enumerate(begins)]
            bounds = zip(self._receives, begins, ends, strict=True)
            found.append((tensor, [values[begin:end] for values, begin, end in bounds]))
        return found

    def finish(self) -> None:
        """See :meth:`TransformInFlight.finish`."""
        self._pending.wait()
        starts = [0] * len(self._sends)
        for owner, own in self._slices:
            starts[owner] = _copy_to(own, self._sends[owner], starts[owner])

    def _exchange(
        self, receives: Sequence[torch.Tensor], sends: Sequence[torch.Tensor], label: str
    ) -> PendingCollective:
        return self._collectives.exchange(receives, sends, "matrices", self._elements, label)


def _transform(transform: Transform, tensors: Sequence[tuple[SlicedTensor, list[torch.Tensor]]]) -> None:
    """Replace the elements by rank of each tensor by those of what ``transform`` makes of it."""
    if tensors:
        results = transform({tensor.spec.name: tensor.assemble(elements) for tensor, elements in tensors})
        for tensor, elements in tensors:
            tensor.disassemble(results[tensor.spec.name], elements)


def _dealt(
    collectives: Collectives, tensors: Sequence[SlicedTensor], cost: Callable[[ParameterSpec], int]
) -> list[_OwnedTensor]:
    owners = deal_owners([cost(each.spec) for each in tensors], collectives.world_size)
    return [_OwnedTensor(*pair) for pair in zip(tensors, owners, strict=True)]


def _related(tensors: Iterable[SlicedTensor]) -> dict[OwnedRange, frozenset[OwnedRange]]:
    """Return the ranges of tensors with several slices, each with those that it shares tensors with, also
    through others."""
    found: dict[OwnedRange, frozenset[OwnedRange]] = {}
    for tensor in tensors:
        own = {each.master for each in tensor.slices if each.master is not None}
        if len(own) > 1:
            joined = frozenset(own).union(*(found.get(each, ()) for each in own))
            found.update(dict.fromkeys(joined, joined))
    return found


def _copy_to(targets: Sequence[torch.Tensor], source: torch.Tensor, begin: int = 0) -> int:
    """Fill ``targets`` one after another with elements of ``source`` from ``begin`` on. Return the end."""
    for target in targets:
        end = begin + target.numel()
        target.copy_(source[begin:end])
        begin = end
    return begin
