"""host_buffer: alignment, zeros, and the registry of live bytes."""

from __future__ import annotations

import gc

import pytest
import torch

from zero_ext import ops

HUGE_PAGE = 2 << 20


@pytest.mark.parametrize("nbytes", [1, 4096, 5_000_001, HUGE_PAGE])
def test_aligned_zero_and_writable(nbytes: int) -> None:
    buffer = ops.host_buffer(nbytes)
    assert buffer.dtype == torch.uint8 and buffer.shape == (nbytes,) and buffer.is_contiguous()
    assert buffer.data_ptr() % HUGE_PAGE == 0
    assert buffer.untyped_storage().nbytes() == nbytes
    assert not buffer.any()
    buffer.fill_(255)
    assert buffer.long().sum() == 255 * nbytes


def test_bytes_live_as_long_as_the_last_view() -> None:
    gc.collect()
    before = ops.host_buffer_bytes()
    buffer = ops.host_buffer(3_000_000)
    other = ops.host_buffer(500)
    assert ops.host_buffer_bytes() == before + 3_000_500
    view = buffer[:4000].view(torch.float32)
    del buffer
    assert ops.host_buffer_bytes() == before + 3_000_500
    del view
    assert ops.host_buffer_bytes() == before + 500
    del other
    assert ops.host_buffer_bytes() == before


def test_empty_buffer_costs_nothing() -> None:
    before = ops.host_buffer_bytes()
    assert ops.host_buffer(0).shape == (0,)
    assert ops.host_buffer_bytes() == before


def test_refuses_what_it_cannot_give() -> None:
    before = ops.host_buffer_bytes()
    with pytest.raises(RuntimeError, match="nbytes is -1"):
        ops.host_buffer(-1)
    with pytest.raises(RuntimeError, match=rf"refused {2**60} bytes: Cannot allocate memory"):
        ops.host_buffer(2**60)
    with pytest.raises(RuntimeError, match="refused"):
        ops.host_buffer(2**63 - 1)
    assert ops.host_buffer_bytes() == before
