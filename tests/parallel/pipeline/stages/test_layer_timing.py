"""Measured layers: by a clock that the layers themselves move on, alike on all ranks."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn

from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.parallel.pipeline.toy_stages import WIDTH, WORDS, Block, head, mean_loss, mesh_of, specifications
from zero_ext.parallel.pipeline import LayerSpec, PipelineModule, TiedLayerSpec, profile_layers

_now = [0.0]


def clock() -> float:
    return _now[0]


class _Passing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.seconds = backward
        _now[0] += forward
        return hidden.clone()

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        _now[0] += ctx.seconds
        return gradients[0], None, None


class Slow(nn.Module):
    """Takes seconds of the clock forward and backward; more in the first call, and in the second."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros((), device="cpu"))
        self.seconds = forward, backward

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        more = {1: 100.0, 2: 1.0}.get(int(self.calls), 0.0)
        return _Passing.apply(self.linear(hidden), self.seconds[0] + more, self.seconds[1])


@on_ranks(4)
def test_forward_and_backward_are_timed_on_one_rank_for_all(world: World) -> None:
    factor = 1.0 + world.rank
    module = Slow(1.0 * factor, 2.0 * factor)
    before = copy.deepcopy(module.state_dict())
    layers = [
        TiedLayerSpec("words", nn.Embedding, WORDS, WIDTH),
        LayerSpec(Slow, 0.25 * factor, 0.5 * factor),
        torch.tanh,
        module,
        lambda hidden: (hidden, hidden.argmax(-1)),
        lambda hidden, positions: hidden + positions[..., None],
        LayerSpec(Block, 0.5),
        TiedLayerSpec("words", nn.Embedding, WORDS, WIDTH, forward=head),
    ]
    words = torch.randint(WORDS, (2, 5), device="cpu")
    random = torch.get_rng_state()
    found = profile_layers(layers, words, repeats=2, clock=clock)
    assert found == [0.0, 0.75, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0]
    assert all(torch.equal(module.state_dict()[name], value) for name, value in before.items())
    assert module.linear.weight.grad is None
    assert torch.equal(torch.get_rng_state(), random)
    module = PipelineModule(layers, mesh_of(2), loss=mean_loss, split=found)
    assert not any(1 in held and 3 in held for held in module.ranges)


@on_ranks(4)
def test_by_the_machines_own_clock(world: World) -> None:
    layers = specifications()
    found = profile_layers(layers, torch.randint(WORDS, (2, 5), device="cpu"))
    assert len(found) == len(layers) and min(found) > 0
    assert world.everyone(found) == [found] * world.size


@on_ranks(4)
def test_all_ranks_raise_the_error(world: World) -> None:
    words = torch.randint(WORDS, (2, 5), device="cpu")
    torn = [*specifications()[:2], nn.Linear(WIDTH + 1, 1)]
    with pytest.raises(RuntimeError, match=re.escape("layer 2, Linear(in_features=9")):
        profile_layers(torn, words)
    with pytest.raises(RuntimeError, match=r"inputs: expected one micro-batch .* on rank 0, got none"):
        profile_layers(torn, *([words] if world.rank else []))
    with pytest.raises(ValueError, match="repeats: expected an integer of at least 1, got 0"):
        profile_layers(torn, words, repeats=0)
