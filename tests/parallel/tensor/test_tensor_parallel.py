"""Tensor parallelism by torch's own styles under every ZeRO stage: as one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.parallel import training
from tests.parallel.training import (
    WORDS,
    Course,
    alone,
    assert_same_steps,
    assert_same_values,
    batches,
    loss_of,
    mean_over,
)

WIDTH, BLOCKS = 8, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.narrow(torch.tanh(self.wide(self.norm(hidden))))


class Words(nn.Module):
    """Embedding, blocks, scores."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.scores = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(words)
        for block in self.blocks:
            hidden = block(hidden)
        return self.scores(hidden)


def mesh_of(tp: int) -> DeviceMesh:
    """All ranks, tensors split over ``tp`` of them."""
    return training.mesh_of(tp=tp)


def split(model: Words, mesh: DeviceMesh, sequence: bool) -> Words:
    """Splits ``model`` over mesh["tp"]; with ``sequence`` norms work on parts of the sequence."""
    rowwise = {"input_layouts": Replicate(), "output_layouts": Shard(1) if sequence else Replicate()}
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(**rowwise),
        "scores": ColwiseParallel(
            input_layouts=Shard(1) if sequence else Replicate(), output_layouts=Replicate()
        ),
    }
    for number in range(BLOCKS):
        if sequence:
            plan[f"blocks.{number}.norm"] = SequenceParallel()
            plan[f"blocks.{number}.wide"] = ColwiseParallel(input_layouts=Shard(1))
            plan[f"blocks.{number}.narrow"] = RowwiseParallel(output_layouts=Shard(1))
        else:
            plan[f"blocks.{number}.wide"] = ColwiseParallel()
            plan[f"blocks.{number}.narrow"] = RowwiseParallel()
    return parallelize_module(model, mesh["tp"], plan)


def seeded(seed: int) -> Words:
    torch.manual_seed(seed)
    return Words()


def course_of(seed: int, tp: int, config: dict[str, Any], sequence: bool = False) -> Course:
    return Course(split(seeded(seed), mesh_of(tp), sequence), mesh_of(tp), config)


@on_ranks(4, by_turns=True)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("tp", "sequence"), [(2, False), (4, False), (2, True)])
def test_steps_are_those_of_one_process(world: World, tp: int, sequence: bool, stage: int) -> None:
    course, model = course_of(world.seed, tp, {"stage": stage}, sequence), seeded(world.seed)
    records, wanted = course.steps(batches(world.seed, 4)), alone(model, batches(world.seed, 4))
    assert_same_steps((mean_over(world, records.losses), records.norms), tuple(wanted))
    found = zero_ext.full_state_dict(course.model)
    assert found.keys() == model.state_dict().keys()
    assert_same_values(found, model.state_dict())


@on_ranks(4)
def test_a_rank_stores_a_shard_of_its_slice(world: World) -> None:
    course = course_of(world.seed, 2, {"stage": 3, "units": {"persistence_threshold": 0}})
    numel = {True: 0, False: 0}
    for parameter in course.model.parameters():
        numel[isinstance(parameter, DTensor)] += parameter.numel()
    split_numel, plain = numel[True], numel[False]
    stored = sum(unit.layout.shard_numel for unit in course.engine.units)
    padding = 64 * len(course.engine.units)
    assert split_numel / 4 + plain / 2 <= stored <= split_numel / 4 + plain / 2 + padding + plain


@on_ranks(4)
@pytest.mark.parametrize(("saved", "loaded"), [(2, 4), (4, 1), (1, 2)])
def test_checkpoints_load_under_another_split(world: World, saved: int, loaded: int) -> None:
    folder, data = world.shared_folder(), batches(world.seed, 6)
    first = course_of(world.seed, saved, {"stage": 3})
    first.steps(data[:3])
    zero_ext.save_checkpoint(folder, first.model).wait()
    then, model = course_of(world.seed + 1, loaded, {"stage": 1}), seeded(world.seed)
    zero_ext.load_checkpoint(folder, then.model)
    losses = mean_over(world, then.steps(data[3:]).losses)
    assert_same_steps(losses, alone(model, data).losses[3:])
    assert_same_values(zero_ext.full_state_dict(then.model), model.state_dict())


@on_ranks(4)
@pytest.mark.parametrize("stage", [0, 3])
def test_full_values_are_loaded_and_returned(world: World, stage: int) -> None:
    course = course_of(world.seed, 2, {"stage": stage})
    other = seeded(world.seed + 1).state_dict()
    zero_ext.load_full_state_dict(course.model, other)
    found = zero_ext.full_state_dict(course.model)
    assert all(torch.equal(found[name], value) for name, value in other.items())
    words, wanted = batches(world.seed, 1)[0]
    course.model.backward(loss_of(course.model, words, wanted))
    full = Words()
    full.load_state_dict(other)
    loss_of(full, words, wanted).backward()
    for (name, parameter), reference in zip(course.model.named_parameters(), full.parameters(), strict=True):
        gradient = zero_ext.full_gradient(parameter)
        torch.testing.assert_close(gradient, reference.grad, rtol=1e-4, atol=1e-6, msg=name)


@on_ranks(4)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_split_tensors_are_converted_like_full_ones(world: World, stage: int) -> None:
    config = {"stage": stage, "precision": {"dtype": "bf16"}}
    split_in_two, unsplit = course_of(world.seed, 2, config), course_of(world.seed, 1, config)
    made = {name: value.bfloat16() for name, value in seeded(world.seed).state_dict().items()}
    found = zero_ext.full_state_dict(split_in_two.model)
    assert all(torch.equal(found[name], value) for name, value in made.items())
    words, wanted = batches(world.seed, 1)[0]
    for course in (split_in_two, unsplit):
        course.model.backward(loss_of(course.model, words, wanted))
    for parameter, other in zip(split_in_two.model.parameters(), unsplit.model.parameters(), strict=True):
        assert parameter.dtype == torch.bfloat16
        gradient, expected = zero_ext.full_gradient(parameter), zero_ext.full_gradient(other)
        assert gradient.dtype == expected.dtype
        torch.testing.assert_close(gradient, expected, rtol=5e-2, atol=2e-3)


@on_ranks(4)
def test_splits_that_cannot_be_sharded(world: World) -> None:
    model = split(Words(), mesh_of(2), False)
    with pytest.raises(ValueError, match="expected a split over the tensor-parallel ranks"):
        zero_ext.prepare(model, None, {"stage": 3})
    with pytest.raises(ValueError, match="expected a split over the tensor-parallel ranks"):
        zero_ext.prepare(model, None, {"stage": 3}, process_group=mesh_of(4))
    for kind in (zero_ext.Lamb, zero_ext.OneBitAdam, torch.optim.Adafactor):
        optimizer = kind(model.parameters())
        with pytest.raises(ValueError, match=r"Use torch\.optim\.AdamW"):
            zero_ext.prepare(model, optimizer, {"stage": 1}, process_group=mesh_of(2))
