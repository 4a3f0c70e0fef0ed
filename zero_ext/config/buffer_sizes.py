"""Sizes of the buffers for state, by which the engine allocates and plans count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

ALIGNMENT_BYTES = 64  # of every parameter and every shard
STORAGE_ALIGNMENT = 4096  # of memory, offset and length in direct transfers to any device
CHUNK_BUFFERS = 3  # of state that torch's own code steps on NVMe: one is read, one worked on, one written
GRADIENT_CHUNK_ELEMENTS = 1 << 20  # of a gradient on NVMe that others are added to
BYTES_OF_DTYPE = {"fp32": 4, "bf16": 2, "fp16": 2}
# Chunks between storage and an accelerator that are in flight together, in each direction.
SLOTS = 6


def extent_bytes(nbytes: int) -> int:
    """Return bytes that an extent of memory for ``nbytes`` takes: whole pages, nothing more."""
    return -(-nbytes // STORAGE_ALIGNMENT) * STORAGE_ALIGNMENT


class StagingSizes(NamedTuple):
    """Bytes of staging memory in one tier: for gradients on their way to a step there, parameters on their
    way from it, and for what torch's own optimizers work on."""

    gradients: int = 0
    outputs: int = 0
    elementwise: int = 0


def flat_offsets(
    sizes: Sequence[int], itemsize: int, world_size: int, shard_alignment: int = ALIGNMENT_BYTES
) -> tuple[list[int], int]:
    """Return where tensors of ``sizes`` elements begin in a flat buffer, and the elements of all of it: each
    tensor on a boundary of ``ALIGNMENT_BYTES``, each of ``world_size`` equal shards on its own of
    ``shard_alignment`` bytes.
    """
    grain = max(1, ALIGNMENT_BYTES // itemsize)
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += _round_up(size, grain)
    return offsets, _round_up(max(end, 1), max(grain, shard_alignment // itemsize) * world_size)


def staging_chunk_elements(staging_buffer_bytes: int) -> int:
    """Most elements of a buffer: ``staging_buffer_bytes`` hold their gradients and parameters in fp32."""
    return staging_buffer_bytes // (8 * STORAGE_ALIGNMENT) * STORAGE_ALIGNMENT


def stream_chunk_elements(staging_buffer_bytes: int, sizes: Sequence[int]) -> int:
    """Return elements of a chunk of state on NVMe where each has ``sizes`` bytes of values: eight chunks,
    with gradients and parameters in fp32, fit into the ring, in whole blocks of any dtype.
    """
    grain = STORAGE_ALIGNMENT // 2
    return staging_buffer_bytes // 8 // ((sum(sizes) + 8) * grain) * grain


def chunk_buffer_bytes(chunk_elements: int, state: int, output: int) -> int:
    """Return bytes of ``CHUNK_BUFFERS`` chunks of elements with ``state`` bytes of values, the fp32 gradient
    of one, and its parameters where they are in storage, ``output`` bytes each.
    """
    return chunk_elements * (CHUNK_BUFFERS * state + 4 + output)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
