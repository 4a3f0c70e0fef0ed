"""The stream beside the model's: what is ordered is there, and memory is not reused before its time."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.offload import COMPLETED, SideStream

NUMEL = 1000


def seeded(world: World) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(world.seed))


def on_the_device(values: torch.Tensor) -> torch.Tensor:
    moved = values.to("stand_in")
    torch.accelerator.synchronize()
    return moved


def test_a_cpu_has_one_order() -> None:
    side = SideStream(torch.device("cpu"))
    with side.entered():
        assert side.position() is COMPLETED
        side.hold([torch.ones(1)])
        side.drop(torch.ones(1))
    side.release()
    side.join()


@pytest.mark.parametrize("schedule", ["lazy", "random"])
@on_ranks(1, stand_in=True)
def test_inside_comes_after_outside_and_outside_after_join(world: World, schedule: str) -> None:
    torch.stand_in.set_schedule(schedule, world.seed)  # type: ignore[attr-defined]
    wanted, into = seeded(world), torch.zeros(NUMEL, device="stand_in")
    source, side = on_the_device(wanted), SideStream(torch.device("stand_in", 0))
    outer = torch.accelerator.current_stream()
    doubled = source * 2  # outside, and late
    with side.entered():
        assert torch.accelerator.current_stream() != outer
        with side.entered():
            into.copy_(doubled)
        assert torch.accelerator.current_stream() != outer
    assert torch.accelerator.current_stream() == outer
    side.join()
    assert torch.equal((into + 1).cpu(), wanted * 2 + 1)


@pytest.mark.parametrize("ordered", [False, True])
@on_ranks(1, stand_in=True)
def test_who_uses_memory_that_was_left_inside_waits_for_its_position(world: World, ordered: bool) -> None:
    torch.stand_in.set_schedule("lazy")  # type: ignore[attr-defined]
    wanted, shared = seeded(world), on_the_device(torch.zeros(NUMEL))
    source, side = on_the_device(wanted), SideStream(torch.device("stand_in", 0))
    assert side.position() is COMPLETED
    with side.entered():
        shared.copy_(source)
        leaving = side.position()
    if ordered:
        leaving.wait_source()
    assert torch.equal((shared + 1).cpu(), wanted + 1) == ordered


@pytest.mark.parametrize("alive", ["hold", "drop", "neither"])
@on_ranks(1, stand_in=True)
def test_the_allocator_does_not_reuse_memory_that_is_read_inside(world: World, alive: str) -> None:
    torch.stand_in.set_schedule("lazy")  # type: ignore[attr-defined]
    wanted, result = seeded(world), on_the_device(torch.zeros(NUMEL))
    side = SideStream(torch.device("stand_in", 0))
    source = on_the_device(wanted)
    address = source.data_ptr()
    with side.entered():
        if alive == "hold":
            side.hold([source])
        result.copy_(source)
        if alive == "drop":
            side.drop(source)
    del source
    gc.collect()
    again = torch.empty(NUMEL, device="stand_in")
    assert (again.data_ptr() == address) == (alive == "neither")
    again.fill_(7.0)
    torch.accelerator.current_stream().synchronize()
    torch.accelerator.synchronize()
    assert torch.equal(result.cpu(), wanted) == (alive != "neither")
    side.release()
    if alive == "hold":
        assert torch.empty(NUMEL, device="stand_in").data_ptr() == address
