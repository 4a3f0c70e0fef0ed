"""Ranges of a unit's flat buffer that belong to single experts of a mixture."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from zero_ext.offload import COMPLETED, CopyHandle
from zero_ext.offload.shard_storage import ShardStorage
from zero_ext.zero.units.flat_layout import FlatLayout, ParameterSpec
from zero_ext.zero.units.placeholder import has_nan

Ranges = list[tuple[int, int]]  # first element, and the one after the last; ascending


def is_stacked(spec: ParameterSpec, experts: int) -> bool:
    """Return whether a parameter is [experts, ...], with the experts one after another in memory."""
    slices = len(spec.shape) > 1 and spec.shape[0] == experts
    return slices and spec.stride[0] * experts == spec.numel


class ExpertRanges:
    """The ranges of ``experts`` in the flat buffer of ``layout``, and the rest, which all of them share.

    ``stacked`` names the parameters with a slice for each expert.
    """

    def __init__(self, layout: FlatLayout, experts: int, stacked: Collection[str]) -> None:
        self.everyone = frozenset(range(experts))
        self._layout = layout
        self._stacked: list[tuple[int, int]] = []  # offset of each parameter, and elements of one expert
        self._shared: Ranges = []
        for spec, offset in zip(layout.specs, layout.offsets, strict=True):
            if spec.name in stacked:
                self._stacked.append((offset, spec.numel // experts))
            else:
                self._shared.append((offset, offset + spec.numel))

    def of(self, experts: Iterable[int], shared: bool) -> Ranges:
        """Return the ranges of ``experts``, and with ``shared`` those of parameters that are no expert's."""
        numbers = sorted(experts)
        found = [
            (offset + number * size, offset + (number + 1) * size)
            for offset, size in self._stacked
            for number in numbers
        ]
        return merged(found + (self._shared if shared else []))

    def blank_others(self, flat: torch.Tensor, experts: frozenset[int]) -> None:
        """Fill the ranges of all experts but ``experts`` with NaN (0 in other dtypes), and padding with 0."""
        others = torch.tensor(sorted(self.everyone - experts), dtype=torch.int64, device=flat.device)
        count, itemsize, memory = len(self.everyone), flat.itemsize, flat.view(torch.uint8)
        for offset, size in self._stacked:
            rows = memory.narrow(0, offset * itemsize, count * size * itemsize).view(count, -1)
            # These bytes are NaN in every floating-point dtype.
            rows.index_fill_(0, others, 255 if has_nan(flat.dtype) else 0)
        for begin, end in self._layout.gaps:
            flat[begin:end].zero_()


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return ``ranges`` in ascending order, with one range for those that overlap or touch."""
    found: Ranges = []
    for begin, end in sorted(ranges):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def fetch_ranges(storage: ShardStorage, own: torch.Tensor, first: int, ranges: Ranges) -> CopyHandle:
    """Start to fetch what ``own`` has of the ``ranges`` of a flat buffer.

    ``own`` is the slice with the shard in ``storage``, from element ``first`` of the buffer on. NVMe is read
    in full blocks.
    """
    grain, numel = storage.grain, own.numel()
    inside = [(max(begin - first, 0), min(end - first, numel)) for begin, end in ranges]
    blocks = merged(
        (begin // grain * grain, -(-end // grain) * grain) for begin, end in inside if begin < end
    )
    copies: list[CopyHandle] = []
    try:
        for begin, end in blocks:
            copies.append(storage.fetch(own[begin : min(end, numel)], begin))
    except RuntimeError:
        # The caller reuses the memory, into which the copies before this one still write.
        _Copies(copies).wait_source()
        raise
    copies = [copy for copy in copies if copy is not COMPLETED]
    return _Copies(copies) if copies else COMPLETED


class _Copies(CopyHandle):
    """Several copies as one."""

    def __init__(self, copies: list[CopyHandle]) -> None:
        self._copies = copies

    def wait(self) -> None:
        """Wait for all of them, also after one that failed."""
        failure: RuntimeError | None = None
        for copy in self._copies:
            try:
                copy.wait()
            except RuntimeError as error:
                failure = failure or error
        if failure is not None:
            raise failure
