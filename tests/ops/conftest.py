"""Fixtures shared by the op tests."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest
import torch

from tests.ops.helpers import available_isas
from zero_ext import ops


@pytest.fixture(params=available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once at every instruction set of this machine."""
    before = ops.set_isa(request.param)
    yield request.param
    ops.set_isa(before)


@pytest.fixture
def generator() -> torch.Generator:
    """A freshly seeded generator; pytest shows the seed when the test fails."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)
