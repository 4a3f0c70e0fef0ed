"""Parameters that stages share: declared, found, and refused where nobody declared them."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.parallel.pipeline.toy_stages import WIDTH, WORDS, mean_loss, mesh_of, train
from zero_ext.parallel.pipeline import PipelineModule, TiedLayerSpec


class Scores(nn.Module):
    """A head with a weight that it is given."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden, self.weight)


def built() -> list[nn.Module]:
    embedding = nn.Embedding(WORDS, WIDTH)
    return [embedding, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Scores(embedding.weight)]


@on_ranks(4)
def test_a_tie_of_built_modules_is_named(world: World) -> None:
    torch.manual_seed(world.seed)
    layers = built()
    with pytest.raises(ValueError, match=re.escape("ties=[('layers.0.weight', 'layers.3.weight')]")):
        PipelineModule(layers, mesh_of(2), loss=mean_loss)
    ties = [("layers.0.weight", "layers.3.weight")]
    trained = train(world.seed, 2, {"stage": 2}, layers=layers, ties=ties, split="uniform")
    tied = [value for name, value in trained.parameters.items() if name in ties[0]]
    assert len(tied) == 1
    assert all(torch.equal(each, tied[0]) for each in world.everyone(tied[0]))
    # On one rank, a shared parameter needs no name.
    embedding = nn.Embedding(WORDS, WIDTH)
    layers = [embedding, Scores(embedding.weight), nn.Linear(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)]
    train(world.seed, 2, {"stage": 1}, layers=layers, split="uniform", steps=1)


@on_ranks(4)
@pytest.mark.parametrize(
    ("ties", "message"),
    [
        (
            [("layers.0.weight",)],
            "ties: expected the names of at least two parameters, got ('layers.0.weight',)",
        ),
        ([("layers.0.weight", "layers.7.weight")], "with the numbers of 4 layers, got 'layers.7.weight'"),
        ([("layers.0.weight", "weight")], "with the numbers of 4 layers, got 'weight'"),
        ([("layers.1.weight", "layers.2.weight")], "different parameters with different values"),
    ],
)
def test_ties_that_cannot_be(world: World, ties: list[tuple[str, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        PipelineModule(built(), mesh_of(2), loss=mean_loss, ties=ties)


@on_ranks(4)
def test_tied_specifications_of_different_shapes(world: World) -> None:
    layers = [TiedLayerSpec("a", nn.Linear, 4, 4), TiedLayerSpec("a", nn.Linear, 4, 5)]
    with pytest.raises(
        ValueError, match=r"TiedLayerSpec 'a': expected the same parameters in layers \[0, 1\], got "
    ):
        PipelineModule(layers, mesh_of(2), loss=mean_loss)
