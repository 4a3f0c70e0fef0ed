"""host_buffer: alignment, zeros, and the registry of live bytes; blank memory."""

from __future__ import annotations

import gc
import resource
from pathlib import Path

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


def test_refuses_bad_arguments() -> None:
    before = ops.host_buffer_bytes()
    with pytest.raises(RuntimeError, match="nbytes: expected at least 0, got -1"):
        ops.host_buffer(-1)
    with pytest.raises(RuntimeError, match=rf"refused {2**60} bytes .Cannot allocate memory"):
        ops.host_buffer(2**60)
    with pytest.raises(RuntimeError, match="refused"):
        ops.host_buffer(2**63 - 1)
    assert ops.host_buffer_bytes() == before


@pytest.mark.parametrize("nbytes", [0, 1, 5_000_001, 2**40])
def test_blank_memory_is_nan_and_uses_almost_no_memory(nbytes: int) -> None:
    before, resident = ops.host_buffer_bytes(), resident_bytes()
    blank = ops.nan_filled_host_memory(nbytes)
    assert blank.dtype == torch.uint8 and blank.shape == (nbytes,)
    assert bool((blank[:: max(nbytes // 1000, 1)] == 255).all())
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float64):
        assert bool(blank[: nbytes // 8 * 8].view(dtype)[-5:].float().isnan().all())
    assert ops.host_buffer_bytes() == before
    # A read maps a page of 4 KiB.
    assert resident_bytes() - resident < 64 << 20


def test_blank_memory_refuses_bad_arguments() -> None:
    with pytest.raises(RuntimeError, match=r"nbytes: expected at least 0, got -1"):
        ops.nan_filled_host_memory(-1)
    with pytest.raises(RuntimeError, match=r"refused"):
        ops.nan_filled_host_memory(2**62)


def resident_bytes() -> int:
    """Bytes of physical memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
