"""Fixtures shared by the op tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ops.helpers import available_isas
from zero_ext import ops


@pytest.fixture(params=available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once at every instruction set of this machine."""
    before = ops.set_isa(request.param)
    yield request.param
    ops.set_isa(before)
