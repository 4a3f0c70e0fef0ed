"""A torch loop with steps that leave out experts that no token has reached, and comparisons with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

import zero_ext
from tests.multi.rank import World
from tests.zero.unshard.stacked_mixtures import EXPERTS, Batch, batch_of

# Experts that the tokens of two ranks reach, by step and micro-batch. Numbers outside stand for no expert.
NOBODY = [EXPERTS]
STEPS: list[list[list[list[int]]]] = [
    [[[0, 1], [2]], [[3], [1]]],  # none in the second half of the experts
    [[[5], [5, 6]], [NOBODY, [7]]],
    [[NOBODY, NOBODY], [NOBODY, NOBODY]],
    [[[7], NOBODY], [[0], [4, 7]]],
    [[[2, 3], [4]], [[2], [2]]],
]


class Course(NamedTuple):
    """The optimizer and the batches of a run."""

    optimizer: str = "AdamW"
    clip: float = 0.0

    def make(self, model: nn.Module) -> torch.optim.Optimizer:
        """With a decay and moments that change every element, whatever its gradient is."""
        if self.optimizer == "Lion":
            return zero_ext.Lion(model.parameters(), lr=1e-3, weight_decay=0.3)
        kind = getattr(torch.optim, self.optimizer)
        found: torch.optim.Optimizer = kind(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1)
        return found


def batches_of(world: World, step: int) -> list[Batch]:
    """The micro-batches of a step, of as many ranks as there are."""
    return [batch_of(world.seed + step, reach[: world.size]) for reach in STEPS[step % len(STEPS)]]


def reached_in(batches: Iterable[Batch]) -> frozenset[int]:
    return frozenset(number for batch in batches for number in batch.reached())


def unreached_elements(value: torch.Tensor, name: str, reached: frozenset[int]) -> torch.Tensor:
    """Which elements of ``value``, of the parameter ``name``, belong to other experts."""
    others = torch.zeros(value.shape, dtype=torch.bool)
    if ".experts." in name:
        others[sorted(frozenset(range(value.shape[0])) - reached)] = True
    return others


class LazyLoop:
    """Dense steps of torch, or of :class:`zero_ext.Lion` alone, after which the weights and moments of
    experts that were not reached are made what they were."""

    def __init__(self, model: nn.Module, course: Course) -> None:
        self.model, self.optimizer, self._clip = model, course.make(model), course.clip

    def step(self, world: World, batches: Sequence[Batch]) -> None:
        for batch in batches:
            (batch.mean_loss(self.model) / len(batches)).backward()
        reached = reached_in(batches)
        self.update(lambda module: reached)

    def update(self, reached_of: Callable[[str], frozenset[int]]) -> None:
        """A step from the gradients that are there, with the experts that each module has reached."""
        if self._clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        before = {key: value.clone() for key, value in self.values().items()}
        self.optimizer.step()
        for (kind, name), value in self.values().items():
            others = unreached_elements(value, name, reached_of(name.rpartition(".")[0]))
            value[others] = before[kind, name][others] if (kind, name) in before else 0.0
        self.optimizer.zero_grad()

    def values(self) -> dict[tuple[str, str], torch.Tensor]:
        """Weights and moments, live, by kind and name of the parameter."""
        found = {("master", name): each.detach() for name, each in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            for kind, entry in self.optimizer.state[parameter].items():
                if isinstance(entry, torch.Tensor) and entry.dim():
                    found[kind, name] = entry
        return found


def own_shards(optimizer: Any) -> dict[tuple[str, str, int], torch.Tensor]:
    """This rank's master weights and moments by kind, name and first element."""
    found = {}
    for key, value in optimizer.state_dict()["shards"].items():
        kind, name, start = key.split("/")
        found[kind, name, int(start)] = value.cpu()
    return found


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), two.view(torch.uint8))


def check_untouched(
    before: dict[tuple[str, str, int], torch.Tensor],
    after: dict[tuple[str, str, int], torch.Tensor],
    shapes: dict[str, torch.Size],
    reached: frozenset[int],
) -> int:
    """Experts that are not in ``reached`` have the bits that they had. Returns the number of elements."""
    checked = 0
    assert before.keys() == after.keys()
    for (kind, name, start), value in after.items():
        others = unreached_elements(torch.empty(shapes[name]), name, reached).flatten()
        others = others[start : start + value.numel()]
        assert same_bits(value[others], before[kind, name, start][others]), f"{kind} of {name}"
        checked += int(others.sum())
    return checked
