"""Where the memory of several tensors lies in one region of bytes, and the copies there and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Elements of every dtype may start at multiples of it, and no two tensors share a cache line.
_GRAIN = 64


@dataclass(frozen=True)
class Span:
    """A tensor's memory from its first element to its last, ``nbytes`` at ``offset`` of the region.

    An expanded tensor takes its few real elements, a transposed one keeps its strides: what backward
    recomputes from it is computed by the same kernels in the same order.
    """

    offset: int
    nbytes: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Tensors side by side in a region of ``nbytes``, of which each of ``parts`` ranks has an equal part."""

    spans: tuple[Span, ...]
    nbytes: int
    parts: int

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], parts: int = 1, block: int = _GRAIN) -> Layout:
        """The layout of ``tensors``; parts are multiples of ``block`` bytes."""
        spans, offset = [], 0
        for tensor in tensors:
            stride = _stride(tensor)
            numel = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, stride, strict=True))
            nbytes = numel * tensor.element_size()
            spans.append(Span(offset, nbytes, tensor.dtype, tuple(tensor.shape), stride))
            offset += -(-nbytes // _GRAIN) * _GRAIN
        grain = parts * block
        return cls(tuple(spans), -(-offset // grain) * grain, parts)

    @property
    def part_bytes(self) -> int:
        """Bytes of a rank's part."""
        return self.nbytes // self.parts

    def pack(self, part: torch.Tensor, tensors: Sequence[torch.Tensor], rank: int) -> None:
        """Fills ``part`` [part_bytes], uint8, with what of ``tensors`` lies in the part of ``rank``."""
        first = rank * self.part_bytes
        for span, tensor in zip(self.spans, tensors, strict=True):
            begin, end = max(span.offset, first), min(span.offset + span.nbytes, first + self.part_bytes)
            if begin < end:
                memory = _memory(tensor, span).view(torch.uint8)
                part[begin - first : end - first].copy_(memory[begin - span.offset : end - span.offset])

    def tensors(self, region: torch.Tensor) -> list[torch.Tensor]:
        """The tensors in ``region`` [nbytes], uint8: views with their own sizes and strides."""
        found = []
        for span in self.spans:
            flat = region[span.offset : span.offset + span.nbytes].view(span.dtype)
            found.append(flat.as_strided(span.size, span.stride))
        return found


def fits(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but plain memory: its bytes are all there is to keep of it."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.numel() > 0
    )


def _stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's strides, or those of a contiguous copy where its memory has large gaps."""
    span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    if span <= 2 * tensor.numel():
        return tensor.stride()
    return torch.empty(tensor.shape, device="meta").stride()


def _memory(tensor: torch.Tensor, span: Span) -> torch.Tensor:
    """The flat elements that ``span`` stands for."""
    if tensor.stride() != span.stride:
        tensor = tensor.contiguous()
    return tensor.detach().as_strided((span.nbytes // tensor.element_size(),), (1,))
