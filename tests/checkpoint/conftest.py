"""Fixtures of the checkpoint tests."""

from __future__ import annotations

import secrets

import pytest


@pytest.fixture
def seed() -> int:
    """Another state in every run; pytest prints it when the test fails."""
    value = secrets.randbelow(10**6) + 1
    print("random seed", value)
    return value
