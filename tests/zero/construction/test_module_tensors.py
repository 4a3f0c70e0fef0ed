"""Tensors over a parameter's memory follow it, or are refused before anything is sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import WIDTH, feature_batch
from tests.zero.training import adamw, configuration, prepared


class Pair(nn.Module):
    def __init__(self, share: Callable[[Any], object]) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)
        share(self)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(features))


SHARED: dict[str, Callable[[Any], object]] = {
    "a parameter over data": lambda m: setattr(m.b, "weight", nn.Parameter(m.a.weight.data)),
    "a parameter over a part": lambda m: setattr(m, "part", nn.Parameter(m.a.weight.data[1:3])),
    "a buffer": lambda m: m.register_buffer("start", m.a.weight.data),
    "in a list": lambda m: setattr(m, "stored", [m.a.weight.detach().t()]),
}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("what", list(SHARED))
def test_shared_memory_is_refused_by_name(what: str, stage: int) -> None:
    model = Pair(SHARED[what])
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(ValueError, match=r"'(a|b)\.weight'.*clone"):
        zero_ext.prepare(model, None, configuration(stage))
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), before, strict=True))


@on_ranks(2)
def test_shared_memory_is_refused_when_it_is_made_inside_init(world: World) -> None:
    with (
        pytest.raises(ValueError, match=r"Linear\.weight.*two over the same memory"),
        zero_ext.Init(configuration(3), process_group=world.group),
    ):
        Pair(SHARED["a parameter over data"])


class StoresView(Pair):
    """Stores a view of a weight as an attribute, and uses it."""

    def __init__(self) -> None:
        super().__init__(lambda m: setattr(m, "stored", m.a.weight.detach()[1:4].t()))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return super().forward(features)[:, :3] + features @ self.stored


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_attribute_over_a_parameter_follows_it(world: World, stage: int) -> None:
    torch.manual_seed(world.seed)
    plain = StoresView()
    torch.manual_seed(world.seed)
    twin = StoresView()
    model, optimizer = prepared(world, twin, stage)
    reference = adamw(plain.parameters())
    for step in range(3):
        losses = []
        for module, stepped in ((plain, reference), (model, optimizer)):
            loss = module(feature_batch(world.seed, step, 0, 0)).square().mean()
            loss.backward()
            stepped.step()
            stepped.zero_grad()
            losses.append(loss.item())
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
