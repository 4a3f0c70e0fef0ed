"""Device memory: closed to the host, counted, limited, poisoned when freed."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
import torch

from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World

READS = {
    "read": "ctypes.string_at(tensor.data_ptr(), 1)",
    "write": "ctypes.memset(tensor.data_ptr(), 0, 1)",
    "numpy of a view by address": "numpy.copy(numpy.ctypeslib.as_array(floats, (4,)))",
}
TOUCH = """
import ctypes, numpy, torch
from tests.accelerator.stand_in import enable
enable()
tensor = torch.ones(4, device="stand_in")
floats = ctypes.cast(tensor.data_ptr(), ctypes.POINTER(ctypes.c_float))
print("before", flush=True)
{touch}
print("after", flush=True)
"""


@pytest.mark.parametrize("touch", READS)
def test_the_host_cannot_touch_it(touch: str) -> None:
    child = subprocess.run(
        [sys.executable, "-c", TOUCH.format(touch=READS[touch])], capture_output=True, text=True, timeout=120
    )
    assert child.returncode == -signal.SIGSEGV, child.stderr
    assert child.stdout == "before\n"


@on_ranks(1, stand_in=True)
def test_bytes_are_counted(world: World) -> None:
    accelerator = torch.accelerator
    before = accelerator.memory_allocated()
    requested = accelerator.memory_stats()["requested_bytes.all.current"]
    accelerator.reset_peak_memory_stats()
    first = torch.empty(1000, device="stand_in")
    second = torch.empty(513, dtype=torch.uint8, device="stand_in")
    assert accelerator.memory_allocated() - before == 4096 + 1024
    assert accelerator.memory_stats()["requested_bytes.all.current"] - requested == 4000 + 513
    del second
    assert accelerator.memory_allocated() - before == 4096
    first.untyped_storage().resize_(0)
    assert accelerator.memory_allocated() == before
    assert accelerator.max_memory_allocated() - before == 4096 + 1024
    first.untyped_storage().resize_(4000)
    assert accelerator.memory_allocated() - before == 4096
    assert first.isnan().all()


@on_ranks(1, stand_in=True)
def test_large_allocations_are_counted_by_themselves(world: World) -> None:
    def large(kind: str) -> int:
        return torch.accelerator.memory_stats()[f"allocation.large_pool.{kind}"]

    made, held = large("allocated"), large("current")
    alive = torch.empty(64 << 10, dtype=torch.uint8, device="stand_in")
    torch.empty((64 << 10) - 1, dtype=torch.uint8, device="stand_in")
    torch.empty(1 << 20, device="stand_in")
    assert (large("allocated") - made, large("current") - held) == (2, 1)
    del alive
    assert large("current") == held


@on_ranks(1, stand_in=True)
def test_a_limit_is_enforced(world: World) -> None:
    device = torch.stand_in
    free_before, total = device.mem_get_info()
    held = torch.zeros(1 << 20, device="stand_in")
    device.set_memory_limit(torch.accelerator.memory_allocated() + (1 << 20))
    try:
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 1048577 bytes"):
            torch.empty((1 << 20) + 1, dtype=torch.uint8, device="stand_in")
        fits = torch.zeros(1 << 20, dtype=torch.uint8, device="stand_in")
        assert device.mem_get_info()[0] == 0
        del fits, held
        assert torch.zeros(1 << 20, device="stand_in").sum().item() == 0
    finally:
        device.set_memory_limit(total)
    assert device.mem_get_info() == (free_before, total)


@on_ranks(1, stand_in=True)
def test_new_memory_is_poison(world: World) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        assert torch.empty(100, dtype=dtype, device="stand_in").isnan().all()
    assert (torch.empty(100, dtype=torch.int64, device="stand_in") == -1).all()


def copied_after_free(record: bool) -> torch.Tensor:
    """What a side stream copies of a tensor that the host dropped before the stream got to it."""
    torch.stand_in.set_schedule("lazy")
    side = torch.Stream(device="stand_in")
    source = torch.arange(100.0, device="stand_in")
    into = torch.zeros(100).pin_memory()
    torch.accelerator.synchronize()
    with side:
        into.copy_(source, non_blocking=True)
    if record:
        source.record_stream(side)
    del source
    side.synchronize()
    return into


@on_ranks(1, stand_in=True)
def test_freed_memory_is_poison_to_a_stream_nobody_named(world: World) -> None:
    assert copied_after_free(record=False).isnan().all()


@on_ranks(1, stand_in=True)
def test_record_stream_delays_reuse_of_memory(world: World) -> None:
    before = torch.accelerator.memory_allocated()
    assert torch.equal(copied_after_free(record=True), torch.arange(100.0))
    assert torch.accelerator.memory_allocated() == before


@on_ranks(1, stand_in=True)
def test_pinned_memory(world: World) -> None:
    device = torch.stand_in
    plain, pinned = torch.ones(100), torch.ones(100).pin_memory()
    assert not plain.is_pinned() and pinned.is_pinned() and pinned[50:].is_pinned()
    assert torch.empty(7, pin_memory=True).is_pinned()
    copies = device.pageable_copies()
    pinned.to("stand_in", non_blocking=True)
    assert device.pageable_copies() == copies
    plain.to("stand_in", non_blocking=True)
    assert device.pageable_copies() == copies + 1
    device.host_register(plain.data_ptr(), plain.nbytes)
    try:
        assert plain.is_pinned()
        with pytest.raises(RuntimeError, match="already pinned"):
            device.host_register(plain.data_ptr() + 4, 4)
    finally:
        device.host_unregister(plain.data_ptr())
    assert not plain.is_pinned()


@on_ranks(1, stand_in=True)
def test_pinning_is_refused_on_request(world: World) -> None:
    device = torch.stand_in
    held = device.pinned_bytes()
    device.refuse_pinned(after=1)
    try:
        first = torch.empty(10, pin_memory=True)
        with pytest.raises(RuntimeError, match="pinning 80 bytes of host memory refused"):
            torch.empty(20, pin_memory=True)
        with pytest.raises(RuntimeError, match="pinning 4 bytes"):
            device.host_register(torch.ones(1).data_ptr(), 4)
        assert device.pinned_bytes() == held + first.nbytes
    finally:
        device.refuse_pinned(-1)
    assert torch.empty(20, pin_memory=True).is_pinned()
