"""Where the memory of several tensors lies in one region of bytes, and the copies there and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zero_ext import ops

# Elements of every dtype may start at multiples of it, and no two tensors share a cache line.
_GRAIN = 64
# What the op of flat buffers takes. An accelerator copies by itself.
_PACKED = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Span:
    """A tensor's memory from its first element to its last, or the elements alone where there are large gaps
    between them: ``nbytes`` at ``offset`` of the region, strides ``kept``.

    An expanded tensor takes its few real elements. Each comes back with its ``stride`` and as many elements
    ``beyond`` a multiple of 64 bytes as it began: what backward recomputes from it is computed by the same
    kernels in the same order.
    """

    offset: int
    nbytes: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    kept: tuple[int, ...]
    beyond: int

    @classmethod
    def of(cls, tensor: torch.Tensor, offset: int) -> Span:
        """What is kept of ``tensor``, ``offset`` bytes from the first one's begin."""
        size, stride = tuple(tensor.shape), tensor.stride()
        distinct, kept = _distinct(size, stride), stride
        if elements_of(size, stride) > 2 * math.prod(distinct):
            packed = torch.empty(distinct, device="meta").stride()
            kept = tuple(new if old else 0 for new, old in zip(packed, stride, strict=True))
        nbytes = elements_of(size, kept) * tensor.element_size()
        beyond, odd = divmod(tensor.data_ptr() % _GRAIN, tensor.element_size())
        return cls(offset, nbytes, tensor.dtype, size, stride, kept, 0 if odd else beyond)

    def memory_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The bytes of ``tensor`` to keep, uint8 [nbytes]."""
        tensor = tensor.detach()
        if self.kept != self.stride:
            tensor = tensor.as_strided(_distinct(self.size, self.stride), self.stride).contiguous()
        return tensor.as_strided((self.nbytes // tensor.element_size(),), (1,)).view(torch.uint8)

    def tensor(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor as it was: a view of ``memory``, uint8 [nbytes], if it can be one."""
        flat = memory.view(self.dtype)
        if self.kept == self.stride and not self.beyond:
            return flat.as_strided(self.size, self.stride)
        elements = self.beyond + elements_of(self.size, self.stride)
        whole = torch.empty(elements, dtype=self.dtype, device=memory.device)
        if self.kept == self.stride:
            _copy(whole[self.beyond :].view(torch.uint8), memory, self.dtype)
        else:
            distinct = _distinct(self.size, self.stride)
            whole.as_strided(distinct, self.stride, self.beyond).copy_(flat.as_strided(distinct, self.kept))
        return whole.as_strided(self.size, self.stride, self.beyond)


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
            spans.append(Span.of(tensor, offset))
            offset += -(-spans[-1].nbytes // _GRAIN) * _GRAIN
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
                memory = span.memory_of(tensor)
                into = part[begin - first : end - first]
                _copy(into, memory[begin - span.offset : end - span.offset], span.dtype)

    def tensors(self, region: torch.Tensor) -> list[torch.Tensor]:
        """The tensors in ``region`` [nbytes], uint8, with their own sizes and strides: views of it, or copies
        where kept bytes lie closer together than the tensor's."""
        return [span.tensor(region[span.offset : span.offset + span.nbytes]) for span in self.spans]


def elements_of(size: Sequence[int], stride: Sequence[int]) -> int:
    """Elements of memory from a tensor's first one to its last, ``stride`` apart."""
    return 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))


def _copy(into: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> None:
    """Copies bytes, uint8 [n], of elements of ``dtype``."""
    if dtype in _PACKED and into.device.type == values.device.type == "cpu":
        ops.pack_(into.view(dtype), [values.view(dtype)], [0])
    else:
        into.copy_(values)


def _distinct(size: Sequence[int], stride: Sequence[int]) -> list[int]:
    """The size without the repetitions of expanded dims."""
    return [length if step else 1 for length, step in zip(size, stride, strict=True)]


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
