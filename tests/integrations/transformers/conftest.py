"""Worlds of exactly the wanted size: a Trainer takes all ranks of the default group."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.multi.worlds import Worlds


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Worlds]:
    """Replaces the pool of the other tests."""
    worlds = Worlds(preload=("transformers.trainer", "tests.integrations.transformers.models"))
    yield worlds
    worlds.close()
