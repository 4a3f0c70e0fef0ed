"""Settings of the optimizer that one rank changes alone: the next step refuses them and changes nothing."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn, optim

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.training import check_same, configuration
from zero_ext.comm.process_group import make_collectives
from zero_ext.zero.construction.rank_consistency import Fact, Hyperparameters, refuse_different_facts

# What the last rank sets in a param group, and how the error names both values.
CHANGES: dict[str, tuple[Any, str, str]] = {
    "lr": (0.25, "0.125", "0.25"),
    "betas": ((0.5, 0.75), "[0.9, 0.999]", "[0.5, 0.75]"),
    "weight_decay": (torch.tensor(0.5), "0.01", "0.5"),
    "amsgrad": (True, "False", "True"),
}


def after_backward(world: World, config: dict[str, Any]) -> tuple[nn.Module, optim.Optimizer]:
    torch.manual_seed(world.seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    groups = [{"params": list(layer.parameters()), "name": world.rank} for layer in model]
    optimizer = optim.AdamW(groups, lr=0.125)
    prepared = zero_ext.prepare(model, optimizer, config, process_group=world.group)
    prepared[0](torch.ones(2, 4)).sum().backward()
    return prepared


@on_ranks(2, 3)
@pytest.mark.parametrize("key", CHANGES)
def test_a_step_with_other_settings_is_refused_on_all_ranks(world: World, key: str) -> None:
    value, expected, different = CHANGES[key]
    odd = world.size - 1
    for stage in (0, 3):
        model, optimizer = after_backward(world, configuration(stage))
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
        after = zero_ext.full_state_dict(model)
        check_same(after, before)
        optimizer.param_groups[1][key] = setting
        optimizer.param_groups[0]["lr"] = 1.0  # on all ranks, as a scheduler does
        optimizer.step()
        changed = zero_ext.full_state_dict(model)
        assert not any(torch.equal(changed[name], before[name]) for name in before)


@on_ranks(2)
def test_updates_made_in_backward_with_other_settings_are_a_mixture(world: World) -> None:
    config = configuration(1)
    config["offload"] = {"update_mode": "in_backward"}
    torch.manual_seed(world.seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model, optimizer = zero_ext.prepare(
        model, optim.AdamW(model.parameters(), lr=0.125), config, process_group=world.group
    )
    if world.rank == 1:
        optimizer.param_groups[0]["lr"] = 0.25
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
