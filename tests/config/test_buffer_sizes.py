"""What NCCL's communicators and autograd's gradients take."""

from __future__ import annotations

import pytest

from zero_ext.config.buffer_sizes import UnitGradientBytes, autograd_gradient_bytes, communicator_bytes

MIB = 1 << 20


@pytest.mark.parametrize(
    ("ranks", "of_a_node", "environment", "opened", "buffers"),
    [
        (1, 1, {}, False, 0),
        (8, 8, {}, False, 2 * 32 * 4 * MIB),  # a ring, and messages inside the node
        (8, 8, {}, True, 32 * 4 * MIB),
        (16, 8, {}, False, 3 * 32 * 4 * MIB),
        (16, 1, {}, False, 2 * 32 * 4 * MIB),
        (4, 8, {}, False, 2 * 32 * 4 * MIB),  # part of a node
        (12, 8, {}, False, 3 * 32 * 4 * MIB),  # and of a second one
        (1024, 8, {}, False, 3 * 32 * 4 * MIB),  # ranks of other nodes share a pool
        (8, 8, {"NCCL_BUFFSIZE": str(8 * MIB), "NCCL_MAX_NCHANNELS": "16"}, False, 2 * 16 * 8 * MIB),
        (8, 8, {"NCCL_BUFFSIZE": "?"}, False, 2 * 32 * 4 * MIB),
    ],
)
def test_buffers_of_a_communicator(
    ranks: int, of_a_node: int, environment: dict[str, str], opened: bool, buffers: int
) -> None:
    assert communicator_bytes(ranks, of_a_node, environment, opened=opened) == buffers


@pytest.mark.parametrize(
    ("units", "nbytes"),
    [
        ([], 0),
        ([(30, 30, 0), (70, 10, 0), (9, 5, 0)], 75),  # the next unit's first comes before they are let go
        ([(30, 30, 0), (70, 40, 0), (9, 1, 0)], 71),
        ([(70, 30, 0), (60, 5, 0)], 75),
        ([(30, 30, 0), (70, 10, 0), (20, 20, 20)], 130),  # of a tied table two gradients wait, and their sum
        ([(30, 30, 0), (70, 50, 50)], 180),
    ],
)
def test_gradients_that_autograd_holds(units: list[tuple[int, int, int]], nbytes: int) -> None:
    assert autograd_gradient_bytes(UnitGradientBytes(*unit) for unit in units) == nbytes
