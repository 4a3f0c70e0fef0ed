"""Dropout beside split tensors: a rank's own where tensors are split, the same on all ranks elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.parallel.tensor.test_tensor_parallel import mesh_of
from zero_ext.parallel import apply_tensor_parallel
from zero_ext.parallel.tensor.tp_rng import LOOKS_EVERY

WIDTH, SAMPLES, BLOCKS = 16, 32, 2
PLAN = {"*.wide": "colwise", "*.narrow": "rowwise"}


class Mask(nn.Module):
    """Dropout that keeps what it drew."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[torch.Tensor] = []

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return hidden
        self.drawn.append(torch.rand_like(hidden) > 0.3)
        return hidden * self.drawn[-1]


class Block(nn.Module):
    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.wide, self.inside = nn.Linear(WIDTH, 2 * WIDTH), Mask()
        self.narrow, self.outside = nn.Linear(2 * WIDTH, WIDTH), Mask()
        self.fails = fails

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = self.inside(torch.tanh(self.wide(hidden)))
        if self.fails:
            raise ArithmeticError("in the middle of a block")
        return hidden + self.outside(self.narrow(wide))


class Model(nn.Module):
    def __init__(self, run: Callable[..., Any] = lambda block, hidden: block(hidden)) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.run = run

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = self.run(block, hidden)
        return hidden


def made(seed: int, tp: int, *run: Callable[..., Any]) -> Model:
    """A model split over ``tp`` ranks, the same on all of them; the replicas' generators differ then."""
    torch.manual_seed(seed)
    model = apply_tensor_parallel(Model(*run), mesh_of(tp), PLAN)
    torch.manual_seed(seed + mesh_of(tp)["dp"].get_local_rank())
    return model


def inputs(seed: int) -> torch.Tensor:
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(seed))


@on_ranks(4)
def test_masks_are_a_ranks_own_where_tensors_are_split(world: World) -> None:
    model, hidden = made(world.seed, 2), inputs(world.seed)
    output = model(hidden)
    after = world.everyone(torch.rand(5).tolist())
    coordinates = world.everyone((mesh_of(2)["dp"].get_local_rank(), mesh_of(2)["tp"].get_local_rank()))
    drawn = dict(
        zip(
            coordinates,
            world.everyone([(block.inside.drawn[0], block.outside.drawn[0]) for block in model.blocks]),
            strict=True,
        )
    )
    own = mesh_of(2)["dp"].get_local_rank()
    torch.manual_seed(world.seed)
    alone = Model()
    masks = []
    for number, block in enumerate(alone.blocks):
        (left, outside), (right, same) = drawn[own, 0][number], drawn[own, 1][number]
        assert torch.equal(outside, same)
        assert not torch.equal(left, right)
        assert not torch.equal(outside, drawn[1 - own, 0][number][1])
        assert not torch.equal(left, drawn[1 - own, 0][number][0])
        hidden = hidden + outside * block.narrow(torch.cat([left, right], 1) * block.wide(hidden).tanh())
        masks += [left, right]
    assert not torch.equal(masks[0], masks[2]) and not torch.equal(masks[1], masks[3])
    torch.testing.assert_close(output, hidden)
    for (dp, tp), values in zip(coordinates, after, strict=True):
        assert (values == after[world.rank]) == (dp == own), (dp, tp)


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(4)
def test_blocks_run_again_draw_the_same(world: World, stage: int) -> None:
    runs = [
        (lambda block, hidden: block(hidden)),
        functools.partial(checkpoint, use_reentrant=False),
        functools.partial(checkpoint, use_reentrant=True),
        zero_ext.checkpoint_activations,
    ]
    found = []
    for run in runs:
        model = made(world.seed, 2, run)
        prepared, _ = zero_ext.prepare(
            model, torch.optim.SGD(model.parameters(), lr=1.0), {"stage": stage}, process_group=mesh_of(2)
        )
        hidden = inputs(world.seed).requires_grad_()
        prepared(hidden).square().sum().backward()
        again = inputs(world.seed + 1).requires_grad_()  # regions work as ever after blocks were run again
        prepared(again).square().sum().backward()
        assert hidden.grad is not None and again.grad is not None
        found.append([hidden.grad, again.grad, torch.rand(3)])
        for block in model.blocks:
            drawn = block.inside.drawn
            assert torch.equal(drawn[0], drawn[1]) == (run is not runs[0])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=0)


@on_ranks(4)
def test_generators_that_differ_are_refused_once_they_matter(world: World) -> None:
    model = made(world.seed, 2)
    torch.manual_seed(world.seed + world.rank)
    model.eval()
    model(inputs(world.seed))  # draws nothing
    model.train()
    with pytest.raises(RuntimeError, match=r'differ, so dropout.*Give the ranks along "tp" one seed'):
        model(inputs(world.seed))
    torch.manual_seed(world.seed)
    for _ in range(LOOKS_EVERY - 1):
        model(inputs(world.seed))
    if world.rank % 2:
        torch.rand(1)
    with pytest.raises(RuntimeError, match="draw random numbers on all of them alike"):
        model(inputs(world.seed))


@on_ranks(4)
def test_a_forward_that_fails_leaves_the_generator_alike_on_all_ranks(world: World) -> None:
    model = made(world.seed, 2)
    model.blocks[1].fails = True
    with pytest.raises(ArithmeticError):
        model(inputs(world.seed))
    own = mesh_of(2)["dp"].get_local_rank()
    values = world.everyone((own, torch.rand(5).tolist()))
    assert all((other == values[world.rank][1]) == (dp == own) for dp, other in values)


@on_ranks(4)
def test_a_model_in_evaluation_draws_as_without_split_tensors(world: World) -> None:
    model = made(world.seed, 4).eval()
    before = torch.get_rng_state()
    model(inputs(world.seed))
    assert torch.equal(before, torch.get_rng_state())
