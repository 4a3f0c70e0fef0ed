"""Mixtures whose experts are on different ranks, under every ZeRO stage and on other axes: as one process."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.parallel import training
from tests.parallel.experts.mixtures import (
    BLOCKS,
    EXPERTS,
    WIDTH,
    Words,
    alone,
    counting,
    course_of,
    expert,
    loss_of,
    mesh_of,
)
from tests.parallel.pipeline.toy_stages import split_blocks
from tests.parallel.training import (
    WORDS,
    adamw,
    assert_same_steps,
    assert_same_values,
    batches,
    mean_over,
)
from zero_ext.parallel.experts import MixtureOfExperts
from zero_ext.parallel.pipeline import LayerSpec, PipelineModule


@on_ranks(4, by_turns=True)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ep", [2, 4])
def test_steps_are_those_of_one_process(world: World, ep: int, stage: int) -> None:
    dropped: list[int] = []
    course = course_of(world.seed, mesh_of(ep), {"stage": stage}, counting(dropped))
    records = course.steps(batches(world.seed, 4))
    wanted, parameters = alone(world.seed, 4)
    assert_same_steps((mean_over(world, records.losses), records.norms), tuple(wanted))
    assert dropped == [0] * 4
    found = zero_ext.full_state_dict(course.model)
    expert_names = {name for name in found if ".experts." in name}
    assert len(expert_names) == BLOCKS * EXPERTS // ep * 4
    assert found.keys() - expert_names == {name for name in parameters if ".experts." not in name}
    assert_same_values(found, parameters)


@on_ranks(4)
@pytest.mark.parametrize("stage", [1, 3])
def test_dropped_tokens_are_those_of_one_process(world: World, stage: int) -> None:
    own: list[int] = []
    course = course_of(
        world.seed, mesh_of(2), {"stage": stage}, counting(own, balanced=False), capacity_factor=0.75
    )
    records = course.steps(batches(world.seed, 3))
    of_chunks: list[int] = []
    torch.manual_seed(world.seed)
    model = Words(capacity_factor=0.75)
    wanted = training.alone(model, batches(world.seed, 3), counting(of_chunks, balanced=False), chunks=4)
    assert_same_steps((mean_over(world, records.losses), records.norms), tuple(wanted))
    dropped = torch.tensor(world.everyone(own)).sum(0).tolist()
    assert dropped == torch.tensor(of_chunks).view(3, 4).sum(1).tolist() and min(dropped) > 0


@on_ranks(4)
@pytest.mark.parametrize("ep", [2, 4])
def test_a_rank_stores_a_fourth_of_everything(world: World, ep: int) -> None:
    config = {"stage": 3, "units": {"persistence_threshold": 0}}
    units = course_of(world.seed, mesh_of(ep), config).engine.units
    stored = sum(unit.layout.shard_numel for unit in units)
    full = sum(parameter.numel() for parameter in Words().parameters())
    gaps = sum(end - begin for unit in units for begin, end in unit.layout.gaps)
    assert full / 4 <= stored <= full / 4 + gaps
    experts = [unit for unit in units if ".experts." in unit.layout.specs[0].name]
    assert {unit.collectives.world_size for unit in experts} == {4 // ep}


@on_ranks(4)
def test_norms_count_every_expert_once(world: World) -> None:
    course = course_of(world.seed, mesh_of(2), {"stage": 2, "gradient_clipping": 0.0})
    words, wanted = batches(world.seed, 1)[0]
    torch.manual_seed(world.seed)
    full = Words()
    loss_of(full, words, wanted, True)[0].backward()
    for norm in (2.0, float("inf")):
        loss_of(course.model, course.own(words), course.own(wanted), True)[0].backward()
        found = course.model.clip_grad_norm_(1e9, norm)
        exact = nn.utils.get_total_norm([p.grad for p in full.parameters() if p.grad is not None], norm)
        assert_same_steps(found, exact)
        for name, parameter in course.model.named_parameters():
            gradient, reference = zero_ext.full_gradient(parameter), full.get_parameter(name).grad
            torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-6)
        course.optimizer.zero_grad()


@on_ranks(4)
def test_experts_move_to_other_ranks(world: World) -> None:
    folder = world.shared_folder()
    first = course_of(world.seed, mesh_of(2), {"stage": 3})
    first.steps(batches(world.seed, 3))
    zero_ext.save_checkpoint(folder, first.model).wait()
    if world.rank == 0:
        zero_ext.checkpoint.export_huggingface(folder, folder / "whole")
        full, parameters = load_file(folder / "whole" / "model.safetensors"), alone(world.seed, 3)[1]
        assert full.keys() == parameters.keys()
        assert_same_values(full, parameters)
    wanted, parameters = alone(world.seed, 5)
    for ep, stage in ((4, 1), (1, 3)):
        then = course_of(world.seed + 1, mesh_of(ep), {"stage": stage})
        zero_ext.load_checkpoint(folder, then.model)
        records = then.steps(batches(world.seed, 5)[3:])
        assert_same_steps(mean_over(world, records.losses), wanted.losses[3:])
        assert_same_values(zero_ext.full_state_dict(then.model), parameters)


@on_ranks(4)
def test_a_model_without_values_is_filled(world: World) -> None:
    folder = world.shared_folder()
    first = course_of(world.seed, mesh_of(4), {"stage": 2})
    zero_ext.save_checkpoint(folder, first.model).wait()
    with torch.device("meta"):
        model = Words(mesh_of(2))
    prepared, _ = zero_ext.prepare(model, adamw(model), {"stage": 3}, process_group=mesh_of(2), init="skip")
    zero_ext.load_checkpoint(folder, prepared)
    torch.manual_seed(world.seed)
    wanted = Words().state_dict()
    for name, value in zero_ext.full_state_dict(prepared).items():
        assert torch.equal(value, wanted[name]), name


class Layers(nn.Module):
    """Two residual layers, a plain one and a mixture."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.mixture = MixtureOfExperts(WIDTH, expert, EXPERTS, mesh=mesh)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.narrow(torch.tanh(self.wide(hidden)))
        return hidden + self.mixture(hidden).hidden


def pipeline_of(seed: int, mesh: DeviceMesh, stage: int) -> training.Course:
    """A pipeline of one stage or two, its blocks split where the mesh has "tp"."""
    blocks = [LayerSpec(Layers, mesh) for _ in range(2)]
    layers = [LayerSpec(nn.Embedding, WORDS, WIDTH), *blocks, LayerSpec(nn.Linear, WIDTH, WORDS)]
    torch.manual_seed(seed)
    module = PipelineModule(layers, mesh, loss=training.mean_loss, split="uniform")
    split_blocks(module, mesh, Layers)
    return training.Course(module, mesh, {"stage": stage}, micro_batches=2)


@on_ranks(4)
@pytest.mark.parametrize(("axis", "stage"), [("pp", 2), ("tp", 3)])
def test_steps_and_checkpoints_on_other_axes(world: World, axis: str, stage: int) -> None:
    folder, single = world.shared_folder(), training.mesh_of_one()
    data = batches(world.seed, 5)
    wanted = pipeline_of(world.seed, single, 0).steps(data)
    course = pipeline_of(world.seed, training.mesh_of(**{axis: 2, "ep": 2}), stage)
    assert_same_steps(tuple(course.steps(data[:3])), (wanted.losses[:3], wanted.norms[:3]))
    zero_ext.save_checkpoint(folder, course.model).wait()
    then = pipeline_of(world.seed + 1, single, 1)
    zero_ext.load_checkpoint(folder, then.model)
    assert_same_steps(tuple(then.steps(data[3:])), (wanted.losses[3:], wanted.norms[3:]))
