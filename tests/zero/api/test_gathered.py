"""``zero_ext.gathered`` on parameters of ``zero_ext.Init`` before there is an engine, or after it closed."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.parallel.experts.mixtures import Words, mesh_of
from tests.parallel.tensor.test_tensor_parallel import mesh_of as tensor_parallel_mesh
from tests.zero.training import check_same


def built(seed: int, width: int = 7) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(13, width), nn.LayerNorm(width), nn.Linear(width, 5))


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
        check_same(prepared, plain)


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


# -- shards that a closed engine left, while no other engine has taken them -------------------------------


def close_engine_of(model: nn.Module, config: dict[str, Any], group: Any) -> None:
    """Prepare ``model`` again, with storage that cannot be made: the engine before is closed by then."""
    with tempfile.NamedTemporaryFile() as file:
        missing = {**config, "offload": {"params": "nvme", "nvme_paths": [file.name]}}
        with pytest.raises(RuntimeError, match="prepare the model again"):
            zero_ext.prepare(model, None, missing, process_group=group)


@on_ranks(2, 4)
@pytest.mark.parametrize("after", [{}, {"units": {"tiles": {"0": 3}}}], ids=["units", "tiles"])
@pytest.mark.parametrize("before", [{}, {"communication": {"shard_group_size": 2}}], ids=["all", "groups"])
def test_edits_reach_their_own_elements_on_every_rank(
    world: World, before: dict[str, Any], after: dict[str, Any]
) -> None:
    plain, model, modifier = built(world.seed, 8), built(world.seed, 8), world.size - 1
    config = {"stage": 3, "units": {"persistence_threshold": 0}}
    zero_ext.prepare(model, None, {**config, **before}, process_group=world.group)
    close_engine_of(model, {"stage": 3, **after}, world.group)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
            with zero_ext.gathered(parameter, modifier_rank=modifier):
                parameter.add_(1.0 if world.rank == modifier else -7.0)
        for parameter in plain.parameters():
            parameter.mul_(2.0).add_(1.0)
    zero_ext.prepare(model, None, config, process_group=world.group)
    check_same(model, plain)


@on_ranks(4)
def test_tensor_parallel_parameters_stay_split(world: World) -> None:
    mesh = tensor_parallel_mesh(2)
    plain, model = built(world.seed, 8), built(world.seed, 8)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    zero_ext.prepare(model, None, {"stage": 3}, process_group=mesh)
    close_engine_of(model, {"stage": 3}, mesh)
    with torch.no_grad():
        assert torch.equal(model[0].weight.clone().full_tensor(), plain[0].weight)
        for parameter in model.parameters():
            parameter.mul_(2.0)
            with zero_ext.gathered(parameter, modifier_rank=0):
                parameter.add_(1.0)
        for parameter in plain.parameters():
            parameter.mul_(2.0).add_(1.0)
    zero_ext.prepare(model, None, {"stage": 3}, process_group=mesh)
    check_same(model, plain)


@on_ranks(4)
def test_experts_have_no_common_value_to_edit(world: World) -> None:
    model = Words(mesh_of(2))
    zero_ext.prepare(model, None, {"stage": 3}, process_group=mesh_of(2))
    close_engine_of(model, {"stage": 3}, mesh_of(2))
    edit = zero_ext.gathered(model, modifier_rank=0)
    with pytest.raises(ValueError, match="holds experts, and rank 0 has others"), edit:
        pass
