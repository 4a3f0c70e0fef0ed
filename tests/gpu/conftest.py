"""Tests of the device: collected where there is a CUDA device, or another is named in ZERO_EXT_TEST_DEVICE.

On the CPU (``ZERO_EXT_TEST_DEVICE=cpu pytest tests/gpu``) the bodies run with the same code and say nothing
of a GPU; tests/gpu_check does so. On ``stand_in`` those of the engine show missing copies and waits.
"""

from __future__ import annotations

import importlib.util
import os
import secrets

import pytest
import torch

# Before cuBLAS starts: its results are then the same from run to run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

DEVICE = os.environ.get("ZERO_EXT_TEST_DEVICE") or ("cuda" if torch.cuda.is_available() else "")
collect_ignore_glob = [] if DEVICE else ["test_*.py"]
if DEVICE == "stand_in":
    from tests.accelerator.stand_in import enable

    enable()
if importlib.util.find_spec("transformers") is None:
    collect_ignore_glob.append("test_llama.py")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device under test."""
    return torch.device(DEVICE) if DEVICE == "cpu" else torch.device(DEVICE, 0)


@pytest.fixture
def generator() -> torch.Generator:
    """A freshly seeded generator of the CPU; pytest shows the seed when the test fails."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)
