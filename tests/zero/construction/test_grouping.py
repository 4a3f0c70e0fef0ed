"""Blocks of a model: mixtures of experts outside of a stack are found by their structure."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from zero_ext.config import ZeroConfig
from zero_ext.zero.construction.grouping import find_blocks

WIDTH, COUNT = 4, 3


class Mixture(nn.Module):
    """A router and experts, of these sizes."""

    def __init__(self, router: nn.Module | nn.Parameter, sizes: tuple[int, ...] = (WIDTH,) * COUNT) -> None:
        super().__init__()
        self.router = router
        self.experts = nn.ModuleList(Expert(size) for size in sizes)


class Expert(nn.Module):
    """Two layers with ``size`` elements between them."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, size), nn.Linear(size, WIDTH)


class Layer(Expert):
    """With a norm, as layers of a stack have."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.norm = nn.LayerNorm(WIDTH)


def stack() -> nn.Module:
    """As many layers as classes of the head next to them."""
    found = Mixture(linear())
    found.experts = nn.ModuleList(Layer(WIDTH) for _ in range(COUNT))
    return found


def linear(rows: int = COUNT) -> nn.Linear:
    """A router with as many outputs."""
    return nn.Linear(WIDTH, rows, bias=False)


def blocks_of(mixture: nn.Module, **units: Any) -> set[str]:
    """Names of the blocks of a model with attention and this mixture, and no stack around them."""
    model = nn.Module()
    model.attention, model.mixture = nn.Linear(WIDTH, WIDTH), mixture
    return set(find_blocks(model, ZeroConfig(stage=3, units=units)))


ENTRIES = {f"mixture.experts.{number}" for number in range(COUNT)}
MIXTURES = {
    "linear": (Mixture(linear()), {"mixture"}),
    "parameter": (Mixture(nn.Parameter(linear().weight)), {"mixture"}),
    "a router to others": (Mixture(linear(COUNT + 1)), ENTRIES),
    "an embedding with a row per entry": (Mixture(nn.Embedding(COUNT, WIDTH)), ENTRIES),
    "layers with norms": (stack(), ENTRIES),
    "a router of other inputs": (Mixture(nn.Linear(WIDTH + 1, COUNT)), ENTRIES),
    "experts of several sizes": (Mixture(linear(), (4, 5, 6)), ENTRIES),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_a_router_and_equal_experts_are_one_block(name: str) -> None:
    mixture, expected = MIXTURES[name]
    assert blocks_of(mixture) == expected


def test_names_in_the_configuration_count_first() -> None:
    assert blocks_of(Mixture(linear()), block_classes=["Expert"]) == ENTRIES
    assert blocks_of(Mixture(linear()), leaf_modules=["mixture.experts.1"]) == ENTRIES
    assert blocks_of(Mixture(linear()), block_classes=["attention"]) == {"attention", "mixture"}


def test_layers_next_to_a_head_of_the_model_are_blocks_of_their_own() -> None:
    assert set(find_blocks(Mixture(linear()), ZeroConfig(stage=3))) == {f"experts.{n}" for n in range(COUNT)}
