"""Estimates of what NCCL's communicators take."""

from __future__ import annotations

import pytest

from zero_ext.config.unplanned_memory import communicator_bytes

MIB = 1 << 20


@pytest.mark.parametrize(
    ("ranks", "of_a_node", "environment", "opened", "buffers"),
    [
        (1, 1, {}, False, 0),
        (8, 8, {}, False, 2 * 32 * 4 * MIB),  # a ring, and messages inside the node
        (8, 8, {}, True, 32 * 4 * MIB),
        (16, 8, {}, False, 3 * 32 * 4 * MIB),
        (16, 1, {}, False, 2 * 32 * 4 * MIB),
        (1024, 8, {}, False, 3 * 32 * 4 * MIB),  # ranks of other nodes share a pool
        (8, 8, {"NCCL_BUFFSIZE": str(8 * MIB), "NCCL_MAX_NCHANNELS": "16"}, False, 2 * 16 * 8 * MIB),
        (8, 8, {"NCCL_BUFFSIZE": "?"}, False, 2 * 32 * 4 * MIB),
    ],
)
def test_buffers_of_a_communicator(
    ranks: int, of_a_node: int, environment: dict[str, str], opened: bool, buffers: int
) -> None:
    assert communicator_bytes(ranks, of_a_node, environment, opened=opened) == buffers
