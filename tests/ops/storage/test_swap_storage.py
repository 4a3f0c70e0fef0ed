"""Storages exchange memory, by PyTorch's own means and by the module that is compiled where it has none."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from tests.ops import torch_2_11
from zero_ext import ops
from zero_ext.ops import host_memory as swapping
from zero_ext.ops.jit import jit_build

SWAP_IMPLEMENTATIONS = ["torch's own", "compiled"] if ops.torch_swaps_storages() else ["compiled"]


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
