"""Groups whose backend serves no host tensor, like the one of ``init_process_group("nccl")``."""

from __future__ import annotations

import tempfile

import pytest
import torch
import torch.distributed as dist

import zero_ext
from tests.multi.mute_group import mute_group
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import TinyModel, language_batch, language_loss
from tests.zero.training import adamw, configuration

STEPS = 2


def trained(
    world: World, group: dist.ProcessGroup, stage: int, device: torch.device, early: bool
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and whole parameters after some steps, with the state saved and loaded between them."""
    torch.manual_seed(world.seed)
    config = configuration(stage, gradient_clipping=0.5)
    if early:
        with zero_ext.Init(config=config, process_group=group):
            model = TinyModel(tied=True)
    else:
        model = TinyModel(tied=True).to(device)
    prepared, optimizer = zero_ext.prepare(model, adamw(model.parameters()), config, process_group=group)
    losses = []
    for step in range(2 * STEPS):
        if step == STEPS:
            folder: list[object] = [tempfile.mkdtemp() if world.rank == 0 else None]
            dist.broadcast_object_list(folder, group=world.group, group_src=0)
            zero_ext.save_checkpoint(str(folder[0]), prepared)
            zero_ext.load_checkpoint(str(folder[0]), prepared)
        loss = language_loss(prepared, language_batch(world.seed, step, 0, world.rank).to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, zero_ext.full_state_dict(prepared, rank0_only=False)


def assert_alike(world: World, stage: int, device: torch.device, early: bool) -> None:
    with pytest.raises(RuntimeError, match="No backend"):
        dist.all_reduce(torch.ones(1), group=mute_group())
    wanted, values = trained(world, world.group, stage, device, early)
    losses, found = trained(world, mute_group(), stage, device, early)
    assert losses == wanted
    assert found.keys() == values.keys() and len(values) > 5
    for name, value in values.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(("stage", "early"), [(0, False), (2, False), (3, False), (3, True)])
@on_ranks(4)
def test_a_group_without_a_backend_for_the_host_trains_saves_and_loads(
    world: World, stage: int, early: bool
) -> None:
    assert_alike(world, stage, torch.device("cpu"), early)


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(3, stand_in=True)
def test_on_a_device(world: World, stage: int) -> None:
    assert_alike(world, stage, torch.device("stand_in", 0), False)
