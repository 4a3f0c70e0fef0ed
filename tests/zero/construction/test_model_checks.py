"""Models whose parameters cannot be followed are refused before anything is sharded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import WIDTH
from tests.zero.training import adamw, configuration


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
