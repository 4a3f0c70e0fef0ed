"""Tensor parallelism by torch's own styles under every ZeRO stage: as one process."""

from __future__ import annotations

import functools
import tempfile
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
from zero_ext.parallel import make_mesh
from zero_ext.zero import engine_of

WIDTH, WORDS, LENGTH, BLOCKS, SAMPLES = 8, 16, 4, 3, 8


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


@functools.cache
def mesh_of(tp: int) -> DeviceMesh:
    """All ranks, tensors split over ``tp`` of them; made once in a process."""
    return make_mesh(tp=tp, device_type="cpu")


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


def batches(seed: int, steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(WORDS, (2, SAMPLES, LENGTH), generator=generator) for _ in range(steps)]


def loss_of(model: nn.Module, words: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(words).flatten(0, 1), wanted.flatten())


class Course:
    """A model on a mesh, and its steps."""

    def __init__(self, seed: int, mesh: DeviceMesh, config: dict[str, Any], sequence: bool = False) -> None:
        torch.manual_seed(seed)
        model = split(Words(), mesh, sequence)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        self.model, self.optimizer = zero_ext.prepare(
            model, optimizer, {"gradient_clipping": 0.5, **config}, process_group=mesh
        )
        self.data = mesh["dp"]

    def steps(self, seed: int, first: int, last: int) -> tuple[list[float], list[float | None]]:
        """Losses of this rank's samples, and norms."""
        share = SAMPLES // self.data.size()
        own = slice(share * self.data.get_local_rank(), share * (self.data.get_local_rank() + 1))
        losses, norms = [], []
        for words, wanted in batches(seed, last)[first:]:
            loss = loss_of(self.model, words[own], wanted[own])
            self.model.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(float(loss.detach()))
            norms.append(engine_of(self.model).grad_norm)
        return losses, norms


def alone(seed: int, steps: int) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(seed)
    model = Words()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    losses, norms = [], []
    for words, wanted in batches(seed, steps):
        loss = loss_of(model, words, wanted)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms, dict(model.state_dict())


def mean_over(world: World, losses: list[float]) -> list[float]:
    return torch.tensor(world.everyone(losses), dtype=torch.float64).mean(0).tolist()


@on_ranks(4)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("tp", "sequence"), [(2, False), (4, False), (2, True)])
def test_steps_are_those_of_one_process(world: World, tp: int, sequence: bool, stage: int) -> None:
    course = Course(world.seed, mesh_of(tp), {"stage": stage}, sequence)
    losses, norms = course.steps(world.seed, 0, 4)
    wanted_losses, wanted_norms, wanted = alone(world.seed, 4)
    torch.testing.assert_close(mean_over(world, losses), wanted_losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(norms, wanted_norms, rtol=1e-5, atol=0)
    found = zero_ext.full_state_dict(course.model)
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-5)


@on_ranks(4)
def test_a_rank_stores_a_shard_of_its_slice(world: World) -> None:
    course = Course(world.seed, mesh_of(2), {"stage": 3, "units": {"persistence_threshold": 0}})
    split_numel = sum(
        parameter.numel() for parameter in course.model.parameters() if isinstance(parameter, DTensor)
    )
    plain = sum(
        parameter.numel() for parameter in course.model.parameters() if not isinstance(parameter, DTensor)
    )
    stored = sum(unit.layout.shard_numel for unit in engine_of(course.model).units)
    padding = 64 * len(engine_of(course.model).units)
    assert split_numel / 4 + plain / 2 <= stored <= split_numel / 4 + plain / 2 + padding + plain


@on_ranks(4)
@pytest.mark.parametrize(("saved", "loaded"), [(2, 4), (4, 1), (1, 2)])
def test_checkpoints_load_under_another_split(world: World, saved: int, loaded: int) -> None:
    folder = str(world.everyone(tempfile.mkdtemp() if world.rank == 0 else None)[0])
    first = Course(world.seed, mesh_of(saved), {"stage": 3})
    first.steps(world.seed, 0, 3)
    zero_ext.save_checkpoint(folder, first.model).wait()
    then = Course(world.seed + 1, mesh_of(loaded), {"stage": 1})
    zero_ext.load_checkpoint(folder, then.model)
    losses, _ = then.steps(world.seed, 3, 6)
    wanted, _, parameters = alone(world.seed, 6)
    torch.testing.assert_close(mean_over(world, losses), wanted[3:], rtol=1e-5, atol=0)
    for name, value in zero_ext.full_state_dict(then.model).items():
        torch.testing.assert_close(value, parameters[name], rtol=1e-4, atol=1e-5)


@on_ranks(4)
@pytest.mark.parametrize("stage", [0, 3])
def test_full_values_are_loaded_and_returned(world: World, stage: int) -> None:
    course = Course(world.seed, mesh_of(2), {"stage": stage})
    torch.manual_seed(world.seed + 1)
    other = Words().state_dict()
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
def test_splits_that_cannot_be_sharded(world: World) -> None:
    model = split(Words(), mesh_of(2), False)
    with pytest.raises(ValueError, match="expected a split over the tensor-parallel ranks"):
        zero_ext.prepare(model, None, {"stage": 3})
    with pytest.raises(ValueError, match="expected a split over the tensor-parallel ranks"):
        zero_ext.prepare(model, None, {"stage": 3}, process_group=mesh_of(4))
    with pytest.raises(ValueError, match="Convert the model before it is split"):
        zero_ext.prepare(model, None, {"precision": {"dtype": "bf16"}}, process_group=mesh_of(2))
    for optimizer in (zero_ext.Lamb(model.parameters()), zero_ext.OneBitAdam(model.parameters())):
        with pytest.raises(ValueError, match=r"Use torch\.optim\.AdamW"):
            zero_ext.prepare(model, optimizer, {"stage": 1}, process_group=mesh_of(2))
