"""The layout of several tensors packed in one region of bytes, and the copies to and from it."""

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
class TensorSpan:
    """A tensor's memory from its first element to its last, or the elements alone where there are large gaps
    between them: ``nbytes`` at ``offset`` of the region, strides ``packed_stride``.

    An expanded tensor takes its few real elements. Each comes back with its ``stride`` and as many elements
    ``beyond`` a multiple of 64 bytes as it began: what backward recomputes from it is computed by the same
    kernels in the same order.
    """

    offset: int
    nbytes: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    packed_stride: tuple[int, ...]
    beyond: int

    @classmethod
    def of(cls, tensor: torch.Tensor, offset: int) -> TensorSpan:
        """Return the span of ``tensor``, ``offset`` bytes from the start of the region."""
        size, stride = tuple(tensor.shape), tensor.stride()
        distinct, packed_stride = _distinct(size, stride), stride
        if elements_of(size, stride) > 2 * math.prod(distinct):
            packed = torch.empty(distinct, device="meta").stride()
            packed_stride = tuple(new if old else 0 for new, old in zip(packed, stride, strict=True))
        nbytes = elements_of(size, packed_stride) * tensor.element_size()
        beyond, odd = divmod(tensor.data_ptr() % _GRAIN, tensor.element_size())
        return cls(offset, nbytes, tensor.dtype, size, stride, packed_stride, 0 if odd else beyond)

    def memory_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the bytes of ``tensor`` to store, uint8 [nbytes]."""
        tensor = tensor.detach()
        if self.packed_stride != self.stride:
            tensor = tensor.as_strided(_distinct(self.size, self.stride), self.stride).contiguous()
        return tensor.as_strided((self.nbytes // tensor.element_size(),), (1,)).view(torch.uint8)

    def tensor(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the tensor as it was: a view of ``memory``, uint8 [nbytes], if it can be one."""
        flat = memory.view(self.dtype)
        if self.packed_stride == self.stride and not self.beyond:
            return flat.as_strided(self.size, self.stride)
        elements = self.beyond + elements_of(self.size, self.stride)
        padded = torch.empty(elements, dtype=self.dtype, device=memory.device)
        if self.packed_stride == self.stride:
            _copy(padded[self.beyond :].view(torch.uint8), memory, self.dtype)
        else:
            distinct = _distinct(self.size, self.stride)
            padded.as_strided(distinct, self.stride, self.beyond).copy_(
                flat.as_strided(distinct, self.packed_stride)
            )
        return padded.as_strided(self.size, self.stride, self.beyond)


@dataclass(frozen=True)
class PackedLayout:
    """Tensors packed in a region of ``nbytes``. Each of ``ranks`` ranks has an equal shard of it."""

    spans: tuple[TensorSpan, ...]
    nbytes: int
    ranks: int

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], ranks: int = 1, block: int = _GRAIN) -> PackedLayout:
        """Return the layout of ``tensors``; shards are multiples of ``block`` bytes."""
        spans, offset = [], 0
        for tensor in tensors:
            spans.append(TensorSpan.of(tensor, offset))
            offset += -(-spans[-1].nbytes // _GRAIN) * _GRAIN
        grain = ranks * block
        return cls(tuple(spans), -(-offset // grain) * grain, ranks)

    @property
    def shard_bytes(self) -> int:
        """Bytes of a rank's shard."""
        return self.nbytes // self.ranks

    def pack(self, shard: torch.Tensor, tensors: Sequence[torch.Tensor], rank: int) -> None:
        """Fill ``shard`` [shard_bytes], uint8, with the shard of ``rank`` of the packed ``tensors``."""
        first = rank * self.shard_bytes
        for span, tensor in zip(self.spans, tensors, strict=True):
            begin, end = max(span.offset, first), min(span.offset + span.nbytes, first + self.shard_bytes)
            if begin < end:
                memory = span.memory_of(tensor)
                into = shard[begin - first : end - first]
                _copy(into, memory[begin - span.offset : end - span.offset], span.dtype)

    def tensors(self, region: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors in ``region`` [nbytes], uint8, with their own sizes and strides: views of it, or
        copies where packed bytes are closer together than those of the tensor.
        """
        return [span.tensor(region[span.offset : span.offset + span.nbytes]) for span in self.spans]


def elements_of(size: Sequence[int], stride: Sequence[int]) -> int:
    """Return elements of memory from a tensor's first one to its last, ``stride`` apart."""
    return 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))


def _copy(into: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> None:
    """Copy bytes, uint8 [n], of elements of ``dtype``."""
    if dtype in _PACKED and into.device.type == values.device.type == "cpu":
        ops.pack_(into.view(dtype), [values.view(dtype)], [0])
    else:
        into.copy_(values)


def _distinct(size: Sequence[int], stride: Sequence[int]) -> list[int]:
    """Return the size without the repetitions of expanded dims."""
    return [length if step else 1 for length, step in zip(size, stride, strict=True)]


def fits(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is nothing but plain memory: its bytes are all there is to store of it."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.numel() > 0
    )
