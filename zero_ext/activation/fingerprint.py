"""Numbers that show whether ranks hold the same tensors: a checksum, and sums that an accelerator adds up."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from zero_ext import ops
from zero_ext.activation.packed_layout import PackedLayout, TensorSpan

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_COLUMNS = 1024
# Odd, with bits everywhere: 2**63 over the golden ratio.
_FACTOR = 0x4F1BBCDCBFA53E0B


def checksum(tensors: Sequence[torch.Tensor]) -> int:
    """62 bits that depend on all values, shapes, dtypes and positions of values among the packed bytes."""
    spans = PackedLayout.of(tensors).spans
    total = named = _facts(spans)
    for span, tensor in zip(spans, tensors, strict=True):
        total = ops.crc32c(span.memory_of(tensor).cpu(), total)
    return (named & 0x3FFFFFFF) << 32 | total


class Fingerprint:
    """An int64 of ``device`` that depends on what was added, and on its order.

    On an accelerator nothing is waited for, and each tensor is read twice by its sums over rows and columns.
    """

    def __init__(self, device: torch.device) -> None:
        self._total = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        """Add the tensors of a call, maybe none."""
        if self._total.device.type == "cpu":
            self._mix(checksum(tensors))
            return
        spans = PackedLayout.of(tensors).spans
        self._mix(_facts(spans))
        for span, tensor in zip(spans, tensors, strict=True):
            self._mix(sums(span.memory_of(tensor), tensor.element_size()))

    def value(self) -> torch.Tensor:
        """Return what was added up to now, int64 [1]."""
        return self._total.view(1)

    def _mix(self, value: torch.Tensor | int) -> None:
        self._total.mul_(_FACTOR).add_(value)


def sums(memory: torch.Tensor, itemsize: int) -> torch.Tensor:
    """Return an int64, on its device, of the bytes ``memory``, uint8 [n], and their positions; n is a
    multiple of ``itemsize``.
    """
    words = memory.view(_WORDS.get(itemsize, torch.int64))
    full_rows = words.numel() // _COLUMNS * _COLUMNS
    body = words[:full_rows].view(-1, _COLUMNS)
    found = torch.cat(
        [body.sum(0, dtype=torch.int64), body.sum(1, dtype=torch.int64), words[full_rows:].long()]
    )
    positions = _mixed(torch.arange(1, found.numel() + 1, device=found.device))
    return _mixed(found + positions).sum()


def _mixed(values: torch.Tensor) -> torch.Tensor:
    """Other values for other ``values``, with bits that depend on all of theirs."""
    for _ in range(2):
        values = values * _FACTOR
        values = values ^ (values >> 32)
    return values * _FACTOR


def _facts(spans: Sequence[TensorSpan]) -> int:
    facts = repr((len(spans), [(str(span.dtype), span.size, span.packed_stride) for span in spans]))
    return zlib.crc32(facts.encode())
