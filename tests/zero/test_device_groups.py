"""Groups whose backend serves no host tensor, like the one of ``init_process_group("nccl")``."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

import zero_ext
from tests.accelerator.stand_in import BACKEND
from tests.multi.mute_group import mute_group
from tests.multi.on_ranks import on_ranks
from tests.multi.pool import RankPool
from tests.multi.rank import World
from tests.zero.models import TinyModel, language_batch, language_loss
from tests.zero.training import adamw, configuration, language_steps

STEPS = 2


def trained(
    world: World, group: dist.ProcessGroup, stage: int, early: bool
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and whole parameters after some steps, with the state saved and loaded between them."""
    torch.manual_seed(world.seed)
    config = configuration(stage, gradient_clipping=0.5)
    if early:
        with zero_ext.Init(config=config, process_group=group):
            model = TinyModel(tied=True)
    else:
        model = TinyModel(tied=True)
    prepared, optimizer = zero_ext.prepare(model, adamw(model.parameters()), config, process_group=group)
    losses = []
    for step in range(2 * STEPS):
        if step == STEPS:
            folder: list[object] = [tempfile.mkdtemp() if world.rank == 0 else None]
            dist.broadcast_object_list(folder, group=world.group, group_src=0)
            zero_ext.save_checkpoint(str(folder[0]), prepared)
            zero_ext.load_checkpoint(str(folder[0]), prepared)
        losses += language_steps(world, prepared, optimizer, [step])
    return losses, zero_ext.full_state_dict(prepared, rank0_only=False)


@pytest.mark.parametrize(("stage", "early"), [(0, False), (2, False), (3, False), (3, True)])
@on_ranks(4)
def test_a_group_without_a_backend_for_the_host_trains_saves_and_loads(
    world: World, stage: int, early: bool
) -> None:
    with pytest.raises(RuntimeError, match="No backend"):
        dist.all_reduce(torch.ones(1), group=mute_group())
    wanted, values = trained(world, world.group, stage, early)
    losses, found = trained(world, mute_group(), stage, early)
    assert losses == wanted
    assert found.keys() == values.keys() and len(values) > 5
    for name, value in values.items():
        assert torch.equal(found[name], value), name


@pytest.fixture(scope="module")
def strict_pool() -> Iterator[RankPool]:
    """Two ranks of a world that has the stand-in's own collectives alone."""
    pool = RankPool(2, stand_in=True, backend=BACKEND)
    yield pool
    pool.close()


def refuse_to_form(world: World) -> str:
    if world.rank == 1:
        torch.get_device_module("stand_in").refuse_communicators()
    return "stand_in"


# Where each rank's model is, and what all ranks are told.
REFUSED: dict[str, tuple[Callable[[World], str], type[Exception], str]] = {
    "ranks on different kinds of device": (
        lambda world: ("cpu", "stand_in")[world.rank],
        ValueError,
        r"one kind of device.*got cpu on rank 0, stand_in over stand_in_ccl on rank 1",
    ),
    "a communicator that does not form": (
        refuse_to_form,
        RuntimeError,
        r"stand_in over stand_in_ccl: the connections of the ranks did not form: .*rank 1 could not form a",
    ),
}


def refused(world: World, what: str) -> None:
    """One error on every rank, nothing sharded, and ranks that go on."""
    position, kind, message = REFUSED[what]
    world.barrier()  # the world's own communicator is there
    model = TinyModel(tied=True).to(position(world))
    before = {name: value.detach().cpu() for name, value in model.state_dict().items()}
    try:
        with pytest.raises(kind, match=message):
            zero_ext.prepare(model, adamw(model.parameters()), configuration(3))
    finally:
        torch.get_device_module("stand_in").refuse_communicators(-1)
    for name, value in model.state_dict().items():
        assert torch.equal(value.cpu(), before[name]), name
    prepared, _ = zero_ext.prepare(model.to("stand_in"), adamw(model.parameters()), configuration(3))
    language_loss(prepared, language_batch(world.seed, 0, 0, world.rank).to("stand_in")).backward()


@pytest.mark.parametrize("what", REFUSED)
def test_ranks_that_cannot_be_connected_are_refused_before_anything_is_sharded(
    strict_pool: RankPool, what: str
) -> None:
    strict_pool.run(2, f"{__name__}:refused", {"what": what})
