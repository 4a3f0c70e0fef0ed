"""Sizes by which the engine allocates and plans count: of buffers, of codes, and of other libraries."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
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


REDUCTIONS_IN_FLIGHT = 2
SHARD_TRANSFERS_IN_FLIGHT = 2  # of units whose reduction has ended, what their homes still move
READS_AHEAD = 2  # pieces of gradients on NVMe that others are added to
WRITES_BEHIND = 2


BLOCK_ELEMENTS = 256
SIGN_BLOCK = 8192


def block_count(elements: int) -> int:
    """Return the number of blocks, and so of scales, of `elements` elements. The last one may be shorter."""
    return -(-elements // BLOCK_ELEMENTS)


def payload_bytes(elements: int, bits: int) -> int:
    """Return bytes of `elements` elements of `bits` bits, padded to 8, and one float32 scale per block."""
    return -(-elements // 8) * bits + 4 * block_count(elements)


def sign_payload_bytes(elements: int) -> int:
    """Return bytes of a message of `elements` signs: 1/32 of float32's, and 0.05% of scales."""
    return 4 * (-(-elements // 32) + -(-elements // SIGN_BLOCK))


NCCL_BUFFER_BYTES = 4 << 20
NCCL_CHANNELS = 32


def communicator_bytes(
    world_size: int, ranks_per_node: int, environment: Mapping[str, str] = os.environ, *, opened: bool = False
) -> int:
    """Estimate the buffers of one NCCL communicator of `world_size` ranks, `ranks_per_node` on a node.

    A buffer of `NCCL_BUFFSIZE` (4 MiB) belongs to each channel of a connection. There are at most
    `NCCL_MAX_NCHANNELS` (32 here, what NCCL uses at most with NVLink). Counted are one connection of a ring,
    one for the messages to the ranks of a node, with channels that these share, and one for those to other
    nodes, which share a pool (`NCCL_NET_SHARED_BUFFERS`). NCCL's own tables and code come on top. No GPU has
    been measured. Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html.

    Args:
        opened: Leave out the ring, which a communicator that has been used has already.
    """
    if world_size == 1:
        return 0
    buffer = _number(environment, "NCCL_BUFFSIZE", NCCL_BUFFER_BYTES)
    channels = _number(environment, "NCCL_MAX_NCHANNELS", NCCL_CHANNELS)
    ranks_per_node = min(world_size, ranks_per_node)
    nodes = -(-world_size // ranks_per_node)
    return buffer * channels * (int(not opened) + int(ranks_per_node > 1) + int(nodes > 1))


class UnitGradientBytes(NamedTuple):
    """Bytes of the gradients of one unit: all, those of its largest parameter, those of shared parameters."""

    all: int
    largest: int
    shared: int = 0


def autograd_gradient_bytes(units: Iterable[UnitGradientBytes]) -> int:
    """Return the most bytes of gradients that autograd holds before the engine has packed them.

    An accelerator packs the gradients of a unit with one kernel when the last of them is there, so those of
    one unit live together. The kernel runs alongside backward, and they live until the next unit's first
    gradient comes. Autograd keeps the gradient of a parameter that several modules share from its
    last use in forward to its first, and makes a third of the two there.

    Args:
        units: The trained units in the order in which backward completes them.
    """
    most = shared = before = 0
    for unit in units:
        most = max(most, unit.all + unit.shared, before + unit.largest + unit.shared)
        shared, before = shared + unit.shared, unit.all
    return most + shared


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdigit() and int(text) else default
