"""A small Llama of transformers on the device: stages and tiers bit for bit alike, and near the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_ext
from benchmarks.harness.shapes import batch_for, build_model, shape_named
from tests.gpu.helpers import assert_near, assert_same
from tests.zero.training import adamw

SHAPE = shape_named("tiny")
OFFLOADS: list[dict[str, Any]] = [
    {"optimizer": "host", "grads": "host"},
    {"optimizer": "host", "grads": "host", "params": "host"},
    {"optimizer": "nvme", "grads": "nvme", "params": "nvme"},
]
TOLERANCE = 3e-2
STEPS = 3


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Kernels whose results are the same from run to run."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def train(device: torch.device, stage: int, offload: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    """Losses and final parameters."""
    model = build_model(SHAPE).to(device)
    config = {"stage": stage, "gradient_clipping": 1.0, "offload": offload}
    prepared, optimizer = zero_ext.prepare(model, adamw(model.parameters()), config)
    losses = []
    for step in range(STEPS):
        ids = batch_for(SHAPE, 0, step).to(device)
        loss = prepared(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.cpu() for name, value in zero_ext.full_state_dict(prepared).items()}


def test_near_the_cpu(device: torch.device) -> None:
    assert_near(train(device, 3, {}), train(torch.device("cpu"), 3, {}), TOLERANCE)


def test_stages_are_bit_for_bit_alike(device: torch.device) -> None:
    reference = train(device, 3, {})
    for stage in (0, 1, 2):
        assert_same(train(device, stage, {}), reference)


def test_tiers_are_bit_for_bit_alike(device: torch.device, tmp_path: Path) -> None:
    reference = train(device, 3, {"optimizer": "host"})
    assert_near(reference, train(device, 3, {}), TOLERANCE)  # Adam on the device has its `pow`
    for offload in OFFLOADS:
        paths = {"nvme_paths": [str(tmp_path)]} if "nvme" in offload.values() else {}
        assert_same(train(device, 3, {**offload, **paths}), reference)
