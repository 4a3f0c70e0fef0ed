"""Values of the shards that a closed engine left, while no other engine has taken them."""

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


def built(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(13, 8), nn.LayerNorm(8), nn.Linear(8, 5))


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
    plain, model, modifier = built(world.seed), built(world.seed), world.size - 1
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
    state = zero_ext.full_state_dict(model)
    for name, wanted in plain.state_dict().items():
        assert torch.equal(state[name], wanted), name


@on_ranks(4)
def test_tensor_parallel_parameters_stay_split(world: World) -> None:
    mesh = tensor_parallel_mesh(2)
    plain, model = built(world.seed), built(world.seed)
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
    state = zero_ext.full_state_dict(model)
    for name, wanted in plain.state_dict().items():
        assert torch.equal(state[name], wanted), name


@on_ranks(4)
def test_experts_have_no_common_value_to_edit(world: World) -> None:
    model = Words(mesh_of(2))
    zero_ext.prepare(model, None, {"stage": 3}, process_group=mesh_of(2))
    close_engine_of(model, {"stage": 3}, mesh_of(2))
    edit = zero_ext.gathered(model, modifier_rank=0)
    with pytest.raises(ValueError, match="holds experts, and rank 0 has others"), edit:
        pass
