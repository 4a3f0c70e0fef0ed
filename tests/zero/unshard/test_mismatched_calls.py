"""Ranks that make different calls at the same time: an error that names both, on both, within seconds."""

from __future__ import annotations

import contextlib
import itertools
import random
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import nn

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.comm import Collectives, ProcessGroupTransport
from zero_ext.zero import engine_of

LIMIT_SECONDS = 5.0
SAMPLED_PAIRS = 2  # of each stage and transport


class Trained:
    """A model in the middle of training: there are gradients, and a loss that waits for its backward."""

    def __init__(self, world: World, stage: int, folder: str) -> None:
        torch.manual_seed(world.seed)
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5))
        optimizer = torch.optim.AdamW(model.parameters())
        config = {"stage": stage, "timeout_seconds": 20.0, "units": {"bucket_elements": 50}}
        self.folder, self.layers = folder, list(model)
        self.features = torch.ones(2, 6)
        self.model, self.optimizer = zero_ext.prepare(model, optimizer, config, process_group=world.group)
        for _ in range(2):
            self.optimizer.step() if self.optimizer.state else None
            self.optimizer.zero_grad()
            self.model(self.features).sum().backward()
        self.loss = self.model(self.features).sum()

    @property
    def collectives(self) -> Collectives:
        return engine_of(self.model).collectives


def evaluate(trained: Trained) -> None:
    trained.model.eval()
    with torch.no_grad():
        trained.model(trained.features)


def gather(trained: Trained) -> None:
    with zero_ext.gathered(list(trained.model.parameters())):
        pass


CALLS: dict[str, Callable[[Trained], Any]] = {
    "save_checkpoint": lambda t: zero_ext.save_checkpoint(t.folder, t.model),
    "load_checkpoint": lambda t: zero_ext.load_checkpoint(t.folder, t.model),
    "step": lambda t: t.optimizer.step(),
    "backward": lambda t: t.loss.backward(),
    "clip_grad_norm_": lambda t: t.model.clip_grad_norm_(1e-3),
    "torch clip_grad_norm_": lambda t: nn.utils.clip_grad_norm_(t.model.parameters(), 1e-3),
    "full_state_dict": lambda t: zero_ext.full_state_dict(t.model),
    "gathered": gather,
    "full_gradient": lambda t: zero_ext.full_gradient(t.layers[0].weight),
    "forward": lambda t: t.model(t.features),
    "evaluation": evaluate,
    "read": lambda t: t.layers[1].weight.sum().item(),
}
PAIRS = list(itertools.permutations(CALLS, 2))


def make_next_call(trained: Trained) -> None:
    """Meet the other rank's call where this one's needed no other rank."""
    trained.collectives.sum_(torch.ones(1), "the next call")


class Outcome(NamedTuple):
    """The error of a rank's calls, None without, the seconds until it, and the collectives they began."""

    error: str | None
    seconds: float
    begun: dict[str, dict[int, str]]


def outcome_of(trained: Trained, call: str) -> Outcome:
    began, error = time.monotonic(), None
    try:
        CALLS[call](trained)
        make_next_call(trained)
    except Exception as caught:
        error = str(caught)
    seconds = time.monotonic() - began
    collectives = trained.collectives
    channels = (collectives._gathers.channel, collectives._reductions.channel)
    begun = {each.key: dict(each.recent) for each in channels}
    return Outcome(error, seconds, begun)


def lines_of(function: Callable[..., Any]) -> set[int]:
    return {line for _, _, line in function.__code__.co_lines() if line is not None}


def check(pair: tuple[str, str], outcomes: list[Outcome]) -> None:
    """Assert that both ranks raise and name both calls, or have made the same collectives."""
    if outcomes[0].error is None and outcomes[1].error is None:
        for key, labels in outcomes[0].begun.items():
            others = outcomes[1].begun[key]  # One rank may have begun gathers of its next forward, too.
            assert all(others.get(number, label) == label for number, label in labels.items())
        return
    for rank, (error, seconds, _) in enumerate(outcomes):
        assert error is not None and error.startswith(f"rank {rank}: ") and f"rank {1 - rank}" in error
        assert "expected the same collective on all ranks" in error
        assert seconds < LIMIT_SECONDS, f"rank {rank} raised after {seconds:.1f} s: {error}"
        named = {int(line) for line in re.findall(rf"{Path(__file__).name}:(\d+)", error)}
        for call in pair:
            assert named & (lines_of(CALLS[call]) | lines_of(make_next_call)), f"{call} is not in: {error}"


def over_transport(transport: str) -> contextlib.AbstractContextManager[object]:
    """Choose how ranks exchange what ``zero_ext.prepare`` sets up: as on one host, or as between hosts."""
    if transport == "shared memory":
        return contextlib.nullcontext()
    return mock.patch(
        "zero_ext.comm.process_group.fastest_host_transport", lambda group, _: ProcessGroupTransport(group)
    )


@on_ranks(2)
@pytest.mark.parametrize("transport", ["shared memory", "gloo"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_both_ranks_name_both_calls(world: World, stage: int, transport: str) -> None:
    pairs = random.Random(world.seed + stage).sample(PAIRS, SAMPLED_PAIRS)
    print(f"pairs of seed {world.seed} in stage {stage}: {pairs}")
    failures = []
    for pair in pairs:
        with tempfile.TemporaryDirectory() as folder:
            with over_transport(transport):
                trained = Trained(world, stage, world.everyone(folder)[0])
            outcomes = [Outcome(*each) for each in world.everyone(outcome_of(trained, pair[world.rank]))]
            with contextlib.suppress(RuntimeError):
                trained.collectives.abort("the test of this pair has ended")
        try:
            check(pair, outcomes)
        except AssertionError as error:
            failures.append(f"{pair}: {error}\n{[each.error for each in outcomes]}")
    assert not failures, f"{len(failures)} of {len(pairs)} pairs\n" + "\n".join(failures)
