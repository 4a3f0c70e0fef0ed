"""Optimizer state in a store, streamed through a ring of host memory of fixed size.

A stream is an int64 handle for three things: a store, the fields of the state that is stored in it, and the
ring. The state of a range of elements is stored in one extent, chunk by chunk; a chunk holds all fields of
its elements next to one another, so that it moves in one transfer. The size of chunks follows from the ring's
alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from zero_ext.config.buffer_sizes import BLOCK_ELEMENTS
from zero_ext.ops.load_library import inplace, op

STREAM_COUNTERS = (
    "bytes_read",
    "bytes_written",
    "padding_read",
    "padding_written",
    "nanoseconds_waiting_for_reads",
    "nanoseconds_waiting_for_writes",
    "nanoseconds_computing",
)

# Bytes of each field, and the elements that have them, by type of the moments. Fields are master, exp_avg,
# exp_avg_sq; for uint8 master, both scales, both codes, as adam_step_8bit_ has them.
ADAM_FIELDS: Mapping[torch.dtype, tuple[tuple[int, ...], tuple[int, ...]]] = MappingProxyType(
    {
        torch.float32: ((4, 4, 4), (1, 1, 1)),
        torch.bfloat16: ((4, 2, 2), (1, 1, 1)),
        torch.uint8: ((4, 4, 4, 1, 1), (1, BLOCK_ELEMENTS, BLOCK_ELEMENTS, 1, 1)),
    }
)


def state_stream_open(
    handle: int,
    store: int,
    staging_buffer_bytes: int,
    field_bytes: Sequence[int],
    field_elements: Sequence[int],
) -> None:
    """Open stream `handle`, any number not in use, over `store` and allocate its ring.

    Field i has `field_bytes[i]` bytes for every `field_elements[i]` elements; field 0 is the float32 master.
    Those of :func:`state_stream_adam_` are ``ADAM_FIELDS[moments]``.

    Raises:
        RuntimeError: the ring is too small (the smallest possible is named), a field is impossible, or the
            kernel refuses the memory.
    """
    op("state_stream_open")(handle, store, staging_buffer_bytes, field_bytes, field_elements)


def state_stream_close(handle: int) -> None:
    """Give the ring's memory back, when no op uses it any more; a handle that is not open is ignored."""
    op("state_stream_close")(handle)


def state_stream_chunk_elements(handle: int) -> int:
    """Return elements of a full chunk: parts that begin at multiples of it move without a byte around
    them.
    """
    return op("state_stream_chunk_elements")(handle)


def state_stream_extent_bytes(handle: int, elements: int) -> int:
    """Return bytes of the extent that holds the state of `elements` elements, a multiple of the alignment."""
    return op("state_stream_extent_bytes")(handle, elements)


def state_stream_fill_(handle: int, offset: int, master: Tensor, counters: Tensor) -> None:
    """Write the state of a whole range: field 0 from `master`, the other fields zero.

    Args:
        offset: of the range's extent in the store.
        master: float32, bfloat16 or float16 [n]; stored as float32.
        counters: see :func:`state_stream_adam_`.
    """
    inplace("state_stream_fill_")(handle, offset, master, counters)


def state_stream_read_(
    handle: int,
    offset: int,
    elements: int,
    begin: int,
    end: int,
    fields: Sequence[int],
    tensors: Sequence[Tensor],
    counters: Tensor,
) -> None:
    """Copy fields of the elements [begin, end) of a range out of the store.

    Args:
        offset: of the range's extent; the range has `elements` elements.
        fields: which fields, each at most once.
        tensors: contiguous CPU tensors, one for each of `fields`, of exactly its bytes, any dtype. Fields
            with several elements an entry want `begin` and `end` at whole entries or the range's end.
        counters: see :func:`state_stream_adam_`.

    Raises:
        RuntimeError: a bad argument, before anything moves; or a failed transfer, named by the store.
    """
    inplace("state_stream_read_")(handle, offset, elements, begin, end, fields, tensors, counters)


def state_stream_write_(
    handle: int,
    offset: int,
    elements: int,
    begin: int,
    end: int,
    fields: Sequence[int],
    tensors: Sequence[Tensor],
    counters: Tensor,
) -> None:
    """Copy `tensors` into fields of the elements [begin, end); all else keeps its value.

    Arguments and errors as of :func:`state_stream_read_`. What shares an aligned block with the part is read
    and written back.
    """
    inplace("state_stream_write_")(handle, offset, elements, begin, end, fields, tensors, counters)


def state_stream_adam_(
    handle: int,
    ranges: Tensor,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    segments: Tensor,
    hyper: Tensor,
    grad_scale: Tensor,
    counters: Tensor,
    non_finite: Tensor | None = None,
) -> None:
    """One step of Adam on R ranges with state in the store.

    Equals :func:`zero_ext.ops.adam_step_`, or for 8-bit moments ``adam_step_8bit_``, bit for bit.

    Reads, computation and writes of different chunks are in flight simultaneously; several threads compute
    only where that is faster and storage is not what the step waits for. Chunks that no segment touches are
    left alone unless the state goes elsewhere.

    Args:
        ranges: int64 [R, 6]: elements, offset in the store of the state, of the gradient, of the parameters
            (-1: in memory), number of segments, offset that the state after the step is written to, all of
            it, while the state before stays as it is (-1: it takes its place).
        params: R tensors, float32, bfloat16 or float16: [elements] to receive the rounded master weights, or
            empty where parameters go to the store in that dtype or nowhere. Elements outside all segments
            keep their value in memory; in the store they are rounded from the master weights.
        grads: R tensors, likewise; empty where the gradient is read from the store in that dtype.
        segments: int64 [S, 2] of (begin, end): those of range 0, then of range 1 and so on, sorted, disjoint
            and inside their range.
        hyper, grad_scale: as of ``adam_step_``.
        counters: int64 [7], increased by this call's values, in the order of ``STREAM_COUNTERS``; bytes
            include padding.
        non_finite: as of ``adam_step_``.

    Raises:
        RuntimeError: a bad argument or overlapping extents, before anything moves; or a failed transfer,
            named by the store, with none left in flight: some chunks have then made the step.
    """
    inplace("state_stream_adam_")(
        handle, ranges, params, grads, segments, hyper, grad_scale, counters, non_finite
    )
