"""``zero_ext.gathered`` on parameters of ``zero_ext.Init`` before ``zero_ext.prepare``."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from torch import nn

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World


def built(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(13, 7), nn.LayerNorm(7), nn.Linear(7, 5))


def config(tier: str, folder: str) -> dict[str, Any]:
    offload: dict[str, Any] = {"params": tier}
    if tier == "nvme":
        offload["nvme_paths"] = [folder]
    return {"stage": 3, "offload": offload}


@on_ranks(2, 3)
@pytest.mark.parametrize("tier", ["device", "nvme"])
def test_edits_of_the_modifier_reach_every_shard(world: World, tier: str) -> None:
    plain = built(world.seed)
    with tempfile.TemporaryDirectory() as folder:
        settings = config(tier, folder)
        with zero_ext.Init(settings, process_group=world.group):
            model = built(world.seed)
        with zero_ext.gathered(model):
            for own, wanted in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(own, wanted)
        with torch.no_grad():
            for number in range(world.size):
                # Only the modifier writes; what the others wrote instead is dropped.
                with zero_ext.gathered(model[0].parameters(), modifier_rank=number):
                    model[0].weight.add_(100.0 * (number + 1) if world.rank == number else -7.0)
                plain[0].weight.add_(100.0 * (number + 1))
        assert torch.equal(model[0].weight, plain[0].weight)
        prepared, _ = zero_ext.prepare(model, None, settings, process_group=world.group)
        state = zero_ext.full_state_dict(prepared)
    for name, wanted in plain.state_dict().items():
        assert torch.equal(state[name], wanted), name


@on_ranks(2)
def test_misuse(world: World) -> None:
    with zero_ext.Init({"stage": 3}, process_group=world.group):
        model = built(world.seed)
    with torch.no_grad(), pytest.raises(RuntimeError, match="written to inside"), zero_ext.gathered(model):
        model[0].weight.zero_()
    wrong_rank = pytest.raises(ValueError, match="modifier_rank: expected 0 to 1, got 2")
    with wrong_rank, zero_ext.gathered(model, modifier_rank=2):
        pass
    with pytest.raises(KeyError), zero_ext.gathered(model, modifier_rank=0):
        raise KeyError("own error")
    reshaped = pytest.raises(RuntimeError, match="Change its values, not its shape")
    with reshaped, zero_ext.gathered(model[0].bias, modifier_rank=0):
        model[0].bias.data = torch.zeros(3)
    with zero_ext.gathered(model):
        for own, wanted in zip(model.parameters(), built(world.seed).parameters(), strict=True):
            assert torch.equal(own, wanted)


@on_ranks(2)
def test_inside_an_open_init(world: World) -> None:
    """What the block reads or writes on one rank alone makes no collective of its own."""
    with zero_ext.Init({"stage": 3}, process_group=world.group):
        model = built(world.seed)
        with zero_ext.Init({"stage": 3}, process_group=world.group):
            inner = built(world.seed + 1)
        with torch.no_grad(), zero_ext.gathered(inner, modifier_rank=0):
            if world.rank == 0:
                inner[0].weight.mul_(2)
    wanted = built(world.seed + 1)[0].weight * 2
    with zero_ext.gathered([*model.parameters(), *inner.parameters()]):
        assert torch.equal(inner[0].weight, wanted)
