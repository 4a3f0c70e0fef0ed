"""``unwrap_model_for_generation``: the model itself, whole, for many short forwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from zero_ext.zero.gathered import gathered
from zero_ext.zero.lookup import engine_of


@contextlib.contextmanager
def unwrap_model_for_generation(model: nn.Module) -> Iterator[nn.Module]:
    """The wrapped module, all its parameters whole inside the block; a collective."""
    engine = engine_of(model)
    with gathered(engine.model):
        yield engine.model
