"""Mixtures that cannot be, and what needs the same parameters on every rank: refused on all ranks alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.parallel.experts.mixtures import (
    EXPERTS,
    WIDTH,
    Words,
    course_of,
    expert,
    loss_of,
    mesh_of,
)
from tests.parallel.training import adamw, batches
from zero_ext.parallel.experts import MixtureOfExperts


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"count": 1}, "top_k of MixtureOfExperts: expected 1 to 1, .* got 2"),
        ({"count": 4, "top_k": 0}, "top_k of MixtureOfExperts: expected 1 to 4, .* got 0"),
        ({"count": 4, "capacity_factor": 0.0}, r"capacity_factor of MixtureOfExperts: .* got 0\.0"),
        ({"count": 4, "capacity_factor": -1.0}, r"capacity_factor of MixtureOfExperts: .* got -1\.0"),
        ({"count": 4, "capacity_factor": float("nan")}, "capacity_factor of MixtureOfExperts: .* got nan"),
        ({}, "count of MixtureOfExperts: .* got None"),
        (
            {"count": 2, "experts": [nn.Linear(WIDTH, WIDTH)] * 3},
            "count of MixtureOfExperts: expected 3, .* got 2",
        ),
        (
            {"count": 2, "experts": lambda _: nn.BatchNorm1d(WIDTH)},
            r"expert 0: expected no buffers, .* got \['running_mean', ",
        ),
        (
            {"count": 2, "experts": lambda n: nn.Linear(WIDTH + n, WIDTH)},
            r"expert 1: expected the parameters of expert 0, .*\[8, 8\].* got .*\[8, 9\]",
        ),
    ],
)
def test_mixtures_that_cannot_be(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        MixtureOfExperts(WIDTH, **{"experts": expert, **arguments})


@on_ranks(4)
def test_ranks_that_do_not_share_out_the_experts(world: World) -> None:
    with pytest.raises(ValueError, match="the 4 ranks along 'ep' of the mesh, got 6 experts"):
        MixtureOfExperts(WIDTH, expert, 6, mesh=mesh_of(4))


@on_ranks(4)
def test_one_expert_that_differs_is_refused_by_all_ranks(world: World) -> None:
    def odd(number: int) -> nn.Module:
        return nn.Linear(WIDTH, WIDTH, bias=number != 3)

    seen = "expert 3: expected the parameters" if world.rank % 2 else "another rank along 'ep' refused"
    with pytest.raises(ValueError, match=seen):
        MixtureOfExperts(WIDTH, odd, 4, mesh=mesh_of(2))


@on_ranks(4)
def test_what_prepare_refuses(world: World) -> None:
    def refused(named: str, config: dict[str, Any], optimizer: Any = adamw, ep: int = 2) -> None:
        model = Words(mesh_of(2))
        with pytest.raises(ValueError, match=named):
            zero_ext.prepare(model, optimizer(model), config, process_group=mesh_of(ep))

    refused(r"that have the experts, got \[\]", {"stage": 3}, ep=1)
    refused(r"that have the experts, got \[0, 1, 2, 3\]", {"stage": 3}, ep=4)
    refused("Leave it out", {"stage": 3, "communication": {"shard_group_size": 2}})
    refused("expected no tiles of experts", {"stage": 3, "units": {"tiles": {"Linear": 2}}})
    refused("Lamb with experts", {"stage": 1}, lambda model: zero_ext.Lamb(model.parameters()))
    refused("'ep' axis", {"stage": 1}, lambda model: zero_ext.OneBitAdam(model.parameters()))
    with zero_ext.Init({"stage": 3}):
        presharded = Words(mesh_of(2))
    with pytest.raises(ValueError, match=r"built outside of zero_ext\.Init"):
        zero_ext.prepare(presharded, adamw(presharded), {"stage": 3}, process_group=mesh_of(2))


@on_ranks(4)
def test_experts_of_other_shapes_on_other_ranks(world: World) -> None:
    mesh = mesh_of(4)
    model = nn.ModuleList([MixtureOfExperts(WIDTH, lambda n: nn.Linear(WIDTH, WIDTH + n // 3), 4, mesh=mesh)])
    with pytest.raises(RuntimeError, match=r"Ranks \[3\] differ from rank 0"):
        zero_ext.prepare(model, adamw(model), {"stage": 3}, process_group=mesh)


@on_ranks(4)
def test_what_one_rank_alone_cannot_say_of_experts(world: World) -> None:
    course = course_of(world.seed, mesh_of(2), {"stage": 3, "gradient_clipping": 0.0})
    edit = zero_ext.gathered(course.model, modifier_rank=0)
    with pytest.raises(ValueError, match="holds experts, and rank 0 has others"), edit:
        pass
    words, wanted = batches(world.seed, 1)[0]
    loss_of(course.model, course.own(words), course.own(wanted), True)[0].backward()
    gradients = {name: parameter.grad for name, parameter in course.model.named_parameters()}
    for name, gradient in gradients.items():
        if ".experts." in name and gradient is not None:
            with pytest.raises(RuntimeError, match=r"on other ranks\. Call model\.clip_grad_norm_"):
                torch.linalg.vector_norm(gradient)
    assert sum(".experts." in name for name in gradients) == 2 * 4 * EXPERTS // 2
