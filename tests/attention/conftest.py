"""Fixtures shared by the tests of sparse attention."""

from __future__ import annotations

import secrets

import pytest
import torch


@pytest.fixture(autouse=True)
def seed() -> None:
    """Seeds torch's generator afresh; pytest shows the seed when the test fails."""
    drawn = secrets.randbits(32)
    print(f"seed {drawn}")
    torch.manual_seed(drawn)
