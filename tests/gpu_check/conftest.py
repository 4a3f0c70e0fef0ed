"""Fixtures of the rehearsals: the device is the CPU."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device of tests/gpu, here the CPU."""
    return torch.device("cpu")


@pytest.fixture
def generator() -> torch.Generator:
    """A freshly seeded generator; pytest shows the seed when the test fails."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Toy sizes gain nothing by threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
