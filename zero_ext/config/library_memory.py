"""The device memory that NCCL and autograd take alongside the engine, for plans and for reports."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import NamedTuple

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
