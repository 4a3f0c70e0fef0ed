"""Models that cannot be followed, or differ between ranks, are refused before anything is sharded."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import WIDTH, feature_batch
from tests.zero.training import adamw, check_same, configuration, prepared, train_step
from zero_ext.comm.process_group import make_collectives
from zero_ext.zero.construction.rank_consistency import Fact, Hyperparameters, refuse_different_facts


def with_complex_weight() -> nn.Module:
    model = nn.Linear(WIDTH, WIDTH)
    model.phase = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))  # type: ignore[assignment]
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "traced": (
        lambda: nn.Sequential(torch.jit.trace(nn.Linear(WIDTH, WIDTH), torch.zeros(1, WIDTH))),
        "module '0': expected an ordinary module, got TopLevelTracedModule.*original module",
    ),
    "scripted": (
        lambda: nn.Sequential(torch.jit.script(nn.Linear(WIDTH, WIDTH))),
        "module '0': expected an ordinary module, got RecursiveScriptModule.*original module",
    ),
    "complex": (with_complex_weight, "'phase': expected real numbers.*view_as_complex"),
}


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("what", list(REFUSED))
def test_models_that_are_refused_by_name(what: str, stage: int) -> None:
    make, message = REFUSED[what]
    model = make()
    with pytest.raises(ValueError, match=message):
        zero_ext.prepare(model, adamw(model.parameters()), configuration(stage))


@on_ranks(1, 2)
@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
def test_embeddings_that_rescale_rows_in_forward(world: World, kind: str) -> None:
    """On one rank they are right; several ranks would rescale other rows each."""
    model = nn.Sequential(getattr(nn, kind)(7, WIDTH, max_norm=0.1), nn.Linear(WIDTH, 1))
    if world.size > 1:
        with pytest.raises(ValueError, match=r"'0': expected max_norm=None on 2 ranks, got 0\.1.*gathered"):
            zero_ext.prepare(model, None, configuration(3), process_group=world.group)
        return
    prepared, _ = zero_ext.prepare(model, None, configuration(3), process_group=world.group)
    prepared(torch.tensor([[1, 3]]))
    norms = zero_ext.full_state_dict(prepared)["0.weight"].norm(dim=1)
    assert bool((norms[[1, 3]] <= 0.1 + 1e-6).all()) and bool((norms[[0, 2, 4]] > 0.1).all())


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
    refused = pytest.raises(ValueError, match=r"Linear\.weight.*two over the same memory")
    with refused, zero_ext.Init(configuration(3), process_group=world.group):
        Pair(SHARED["a parameter over data"])


class HoldsView(Pair):
    """Stores a view of a weight as an attribute, and uses it."""

    def __init__(self) -> None:
        super().__init__(lambda m: setattr(m, "stored", m.a.weight.detach()[1:4].t()))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return super().forward(features)[:, :3] + features @ self.stored


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_attribute_over_a_parameter_follows_it(world: World, stage: int) -> None:
    nets = []
    for _ in range(2):
        torch.manual_seed(world.seed)
        nets.append(HoldsView())
    plain, model = (nets[0], adamw(nets[0].parameters())), prepared(world, nets[1], stage)
    for step in range(3):
        batch = feature_batch(world.seed, step, 0, 0)
        losses = [train_step(*pair, pair[0](batch).square().mean()) for pair in (plain, model)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)


# What the last rank sets in a param group, and how the error names both values.
CHANGES: dict[str, tuple[Any, str, str]] = {
    "lr": (0.25, "0.125", "0.25"),
    "betas": ((0.5, 0.75), "[0.9, 0.999]", "[0.5, 0.75]"),
    "weight_decay": (torch.tensor(0.5), "0.01", "0.5"),
    "amsgrad": (True, "False", "True"),
}


def layers_of(world: World) -> nn.Module:
    torch.manual_seed(world.seed)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def after_backward(world: World, stage: int) -> tuple[nn.Module, optim.Optimizer]:
    model = layers_of(world)
    groups = [{"params": list(layer.parameters()), "name": world.rank} for layer in model]
    model, optimizer = prepared(world, model, stage, lambda _: optim.AdamW(groups, lr=0.125))
    model(torch.ones(2, 4)).sum().backward()
    return model, optimizer


@on_ranks(2, 3)
@pytest.mark.parametrize("key", CHANGES)
def test_a_step_with_other_settings_is_refused_on_all_ranks(world: World, key: str) -> None:
    value, expected, different = CHANGES[key]
    odd = world.size - 1
    for stage in (0, 3):
        model, optimizer = after_backward(world, stage)
        before = zero_ext.full_state_dict(model)
        setting = optimizer.param_groups[1][key]
        if world.rank == odd:
            optimizer.param_groups[1][key] = value
        pattern = (
            f"rank {world.rank}: optimizer param group 1, '{key}': expected {expected} on all ranks, as on "
            f"rank 0, got {different} on rank {odd}. Ranks [{odd}] differ from rank 0. Nothing was updated."
        )
        with pytest.raises(RuntimeError, match=re.escape(pattern)):
            optimizer.step()
        check_same(model, before)
        optimizer.param_groups[1][key] = setting
        optimizer.param_groups[0]["lr"] = 1.0  # on all ranks, as a scheduler does
        optimizer.step()
        changed = zero_ext.full_state_dict(model)
        assert not any(torch.equal(changed[name], before[name]) for name in before)


@on_ranks(2)
def test_updates_made_in_backward_with_other_settings_are_a_mixture(world: World) -> None:
    model, optimizer = prepared(world, layers_of(world), 1, offload={"update_mode": "in_backward"})
    optimizer.param_groups[0]["lr"] = 0.125 * (1 + world.rank)
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match=r"'lr': expected 0\.125 .*got 0\.25 on rank 1\..* a mixture"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="its state is damaged"):
        model(torch.ones(2, 4))


def test_only_settings_with_a_default_and_a_plain_value_are_compared() -> None:
    groups: list[dict[str, Any]] = [{"params": [], "lr": 0.5, "note": 1, "hook": object()}]
    first = Hyperparameters(groups, ["lr", "hook"])
    assert list(first.facts()) == [
        Fact("optimizer param group 0, 'lr'", "0.5"),
        Fact("optimizer param group 0, 'hook'", "None"),
    ]
    before = first.checksum()
    groups[0] |= {"note": 2, "hook": object()}
    assert first.checksum() == before
    groups[0]["lr"] = torch.tensor(0.5)
    assert first.checksum() == before
    groups[0]["lr"] = 0.25
    assert first.checksum() != before and 1 <= first.checksum() < 1 << 20


@on_ranks(2, 3)
def test_long_and_many_facts(world: World) -> None:
    collectives = make_collectives(world.group, 20.0)
    facts = [Fact(f"fact {number}", "ü" * number) for number in range(1000)]
    refuse_different_facts(collectives, facts, "")
    if world.rank:
        facts[700] = Fact("x" * 10**6, "\0\x1b" * 10**6)
    with pytest.raises(RuntimeError) as caught:
        refuse_different_facts(collectives, facts, "Advice.")
    text = str(caught.value)
    others = list(range(1, world.size))
    assert "where rank 0 has fact 700: expected ü" in text and len(text.encode()) < 1500
    assert text.endswith(f" on rank 1. Ranks {others} differ from rank 0. Advice.") and text.isprintable()
