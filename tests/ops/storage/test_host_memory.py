"""Memory of the host: host_buffer, blank memory, and storages that exchange theirs."""

from __future__ import annotations

import gc
import resource
from pathlib import Path

import pytest
import torch

from tests.ops import torch_2_11
from zero_ext import ops
from zero_ext.ops import host_memory as swapping
from zero_ext.ops.jit import jit_build

HUGE_PAGE = 2 << 20
SWAP_IMPLEMENTATIONS = ["torch's own", "compiled"] if ops.torch_swaps_storages() else ["compiled"]


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


@pytest.fixture(params=SWAP_IMPLEMENTATIONS)
def swap_implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "compiled":
        torch_2_11.hide_swap(monkeypatch)
    assert ops.torch_swaps_storages() == (request.param == "torch's own")


def test_views_see_the_memory_that_came(swap_implementation: None) -> None:
    region = torch.rand(100)
    wanted = region[:50].clone()
    external = torch.from_dlpack(torch._C._to_dlpack(region[:50]))
    flat = torch.empty(0)
    storage = flat.untyped_storage()
    ops.swap_storages_(storage, external.untyped_storage())
    assert flat.untyped_storage().nbytes() == 200 and external.untyped_storage().nbytes() == 0
    view = flat.set_(storage, 0, (50,), (1,))[10:20].detach()
    assert flat.data_ptr() == region.data_ptr() and torch.equal(view, wanted[10:20])
    view.zero_()
    assert not region[10:20].any() and region[:10].all()
    ops.swap_storages_(storage, external.untyped_storage())
    assert storage.nbytes() == 0 and torch.equal(external, region[:50])


def test_memory_goes_with_the_storage_that_has_it(swap_implementation: None) -> None:
    """Counted by who gives the memory: nothing leaks, and nothing is freed twice."""
    before = ops.host_buffer_bytes()
    one, other = ops.host_buffer(8192), ops.host_buffer(8192)
    one.fill_(1)
    other.fill_(2)
    ops.swap_storages_(one.untyped_storage(), other.untyped_storage())
    assert one[0] == 2 and other[-1] == 1
    del one
    gc.collect()
    assert ops.host_buffer_bytes() == before + 8192 and other.eq(1).all()
    del other
    gc.collect()
    assert ops.host_buffer_bytes() == before


def test_a_storage_may_be_resized_exactly_if_its_memory_may(swap_implementation: None) -> None:
    own, external = torch.ones(8), torch.from_dlpack(torch._C._to_dlpack(torch.zeros(100)[:8]))
    ops.swap_storages_(own.untyped_storage(), external.untyped_storage())
    with pytest.raises(RuntimeError, match="not resizable"):
        own.untyped_storage().resize_(64)
    external.untyped_storage().resize_(64)
    assert external.tolist() == [1] * 8


def test_storages_that_do_not_fit_are_refused(swap_implementation: None) -> None:
    one, other = torch.ones(8), torch.ones(9)
    with pytest.raises(RuntimeError, match="32 and 36"):
        ops.swap_storages_(one.untyped_storage(), other.untyped_storage())
    with pytest.raises(RuntimeError, match=r"cpu.*meta"):
        ops.swap_storages_(one.untyped_storage(), torch.ones(8, device="meta").untyped_storage())
    assert one.sum() == 8 and other.sum() == 9


def test_without_a_compiler_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_2_11.hide_swap(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(swapping, "load_storage_swap", jit_build.build_storage_swap)
    with pytest.raises(RuntimeError, match=r"_C_storage: it is not built, and no C\+\+ compiler.*apt-get"):
        ops.swap_storages_(torch.ones(1).untyped_storage(), torch.ones(1).untyped_storage())


def test_each_torch_has_a_module_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    build = jit_build.cached_storage_swap()
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    other = jit_build.cached_storage_swap()
    assert other.folder != build.folder and "torch2.11.0+cu130" in other.folder.name
    assert other.path.name == "_C_storage.abi3.so"
