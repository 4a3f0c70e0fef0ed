"""Mixtures whose experts are on different ranks, under every ZeRO stage: as one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.parallel.experts.mixtures import BLOCKS, EXPERTS, Course, Words, alone, batches, loss_of, mesh_of
from zero_ext.zero import engine_of


def mean_over(world: World, values: list[float]) -> list[float]:
    return torch.tensor(world.everyone(values), dtype=torch.float64).mean(0).tolist()


@on_ranks(4)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ep", [2, 4])
def test_steps_are_those_of_one_process(world: World, ep: int, stage: int) -> None:
    course = Course(world.seed, mesh_of(ep), {"stage": stage})
    records = course.steps(world.seed, 0, 4)
    wanted, parameters = alone(world.seed, 4)
    torch.testing.assert_close(mean_over(world, records.losses), wanted.losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(records.norms, wanted.norms, rtol=1e-5, atol=0)
    assert records.dropped == [0] * 4
    found = zero_ext.full_state_dict(course.model)
    expert_names = {name for name in found if ".experts." in name}
    assert len(expert_names) == BLOCKS * EXPERTS // ep * 4
    assert found.keys() - expert_names == {name for name in parameters if ".experts." not in name}
    for name, value in found.items():
        torch.testing.assert_close(value, parameters[name], rtol=1e-4, atol=1e-5)


@on_ranks(4)
@pytest.mark.parametrize("stage", [1, 3])
def test_dropped_tokens_are_those_of_one_process(world: World, stage: int) -> None:
    course = Course(world.seed, mesh_of(2), {"stage": stage}, capacity_factor=0.75)
    records = course.steps(world.seed, 0, 3, balanced=False)
    wanted, _ = alone(world.seed, 3, chunks=4, capacity_factor=0.75)
    torch.testing.assert_close(mean_over(world, records.losses), wanted.losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(records.norms, wanted.norms, rtol=1e-5, atol=0)
    dropped = torch.tensor(world.everyone(records.dropped)).sum(0).tolist()
    assert dropped == wanted.dropped and min(dropped) > 0


@on_ranks(4)
@pytest.mark.parametrize("ep", [2, 4])
def test_a_rank_stores_a_fourth_of_everything(world: World, ep: int) -> None:
    course = Course(world.seed, mesh_of(ep), {"stage": 3, "units": {"persistence_threshold": 0}})
    units = engine_of(course.model).units
    stored = sum(unit.layout.shard_numel for unit in units)
    full = sum(parameter.numel() for parameter in Words().parameters())
    gaps = sum(end - begin for unit in units for begin, end in unit.layout.gaps)
    assert full / 4 <= stored <= full / 4 + gaps
    experts = [unit for unit in units if ".experts." in unit.layout.specs[0].name]
    assert {unit.collectives.world_size for unit in experts} == {4 // ep}


@on_ranks(4)
def test_norms_count_every_expert_once(world: World) -> None:
    course = Course(world.seed, mesh_of(2), {"stage": 2, "gradient_clipping": 0.0})
    words, wanted = (each[2 * world.rank :][:2] for each in batches(world.seed, 1)[0])
    torch.manual_seed(world.seed)
    full = Words()
    loss_of(full, *batches(world.seed, 1)[0], True)[0].backward()
    for norm in (2.0, float("inf")):
        loss_of(course.model, words, wanted, True)[0].backward()
        found = course.model.clip_grad_norm_(1e9, norm)
        exact = nn.utils.get_total_norm([p.grad for p in full.parameters() if p.grad is not None], norm)
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=0)
        for name, parameter in course.model.named_parameters():
            gradient, reference = zero_ext.full_gradient(parameter), full.get_parameter(name).grad
            torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-6)
        course.optimizer.zero_grad()
