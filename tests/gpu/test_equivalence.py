"""One GPU, every stage and tier: bit-identical where one processor steps, and near the same run on the CPU.

Of Adam the device's `pow` may differ from the host's in its last place; Lion's steps have no such part.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_ext
from tests.gpu.helpers import assert_near, assert_same, train
from tests.zero.models import TinyModel
from tests.zero.training import Plan

# The device's matrix products add in another order than the CPU's.
TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 1e-2}
PLANS = {
    "fp32": Plan(),
    "bf16 clipped": Plan(clip=0.1, dtype="bf16"),
    "fp16 scaled": Plan(dtype="fp16"),
    "bf16 accumulated": Plan(micro_batches=2, clip=0.1, dtype="bf16"),
}
TIERS: list[dict[str, Any]] = [
    {"optimizer": "host"},
    {"optimizer": "nvme"},
    {"optimizer": "host", "grads": "host"},
    {"optimizer": "nvme", "grads": "nvme"},
    {"optimizer": "host", "grads": "host", "params": "host"},
    {"optimizer": "nvme", "grads": "host", "params": "nvme"},
    {"optimizer": "host", "params": "host", "ratio": 0.5},
    {"optimizer": "host", "params": "host", "update_mode": "in_backward"},
    {"optimizer": "nvme", "grads": "host", "update_mode": "in_backward"},
]
LEAST_STAGE = {"optimizer": 1, "grads": 2, "params": 3}


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Kernels whose results are the same from run to run."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def stages_of(tiers: dict[str, Any]) -> int:
    """The lowest stage that shards everything that leaves the device."""
    return max(LEAST_STAGE.get(kind, 1) for kind in tiers)


def section(tiers: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The section of the configuration."""
    paths = {"nvme_paths": [str(folder)]} if "nvme" in tiers.values() else {}
    return {"staging_buffer_bytes": 1 << 20, **tiers, **paths}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", sorted(PLANS))
def test_tiers_train_bit_for_bit_alike(device: torch.device, tmp_path: Path, name: str, stage: int) -> None:
    plan, seed = PLANS[name], secrets.randbits(30)
    print(f"seed {seed}")
    on_device = train(device, stage, plan, seed)
    on_host = train(device, stage, plan, seed, offload=section(TIERS[0], tmp_path))
    assert_near(on_host, on_device, TOLERANCE[plan.dtype])
    for tiers in TIERS[1:]:
        if stages_of(tiers) <= stage:
            found = train(device, stage, plan, seed, offload=section(tiers, tmp_path))
            try:
                if "ratio" in tiers:  # some units step on the device
                    assert_near(found, on_host, TOLERANCE[plan.dtype])
                else:
                    assert_same(found, on_host)
            except AssertionError as error:
                raise AssertionError(f"{tiers}: {error}") from error


@pytest.mark.parametrize("name", sorted(PLANS))
def test_tiers_train_bit_for_bit_alike_by_lion(device: torch.device, tmp_path: Path, name: str) -> None:
    plan, seed = PLANS[name], secrets.randbits(30)
    print(f"seed {seed}")

    def lion(parameters: Any) -> torch.optim.Optimizer:
        return zero_ext.Lion(parameters, lr=1e-3, weight_decay=0.1)

    reference = train(device, 3, plan, seed, optimizer_of=lion)
    for tiers in TIERS:
        found = train(device, 3, plan, seed, optimizer_of=lion, offload=section(tiers, tmp_path))
        try:
            assert_same(found, reference)
        except AssertionError as error:
            raise AssertionError(f"{tiers}: {error}") from error


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", sorted(PLANS))
def test_the_device_trains_as_the_cpu_does(device: torch.device, name: str, stage: int) -> None:
    plan, seed = PLANS[name], secrets.randbits(30)
    print(f"seed {seed}")
    assert_near(
        train(device, stage, plan, seed),
        train(torch.device("cpu"), stage, plan, seed),
        TOLERANCE[plan.dtype],
    )


@pytest.mark.parametrize("moments", ["bf16", "8bit"])
def test_narrow_moments_train_alike_in_every_tier(device: torch.device, tmp_path: Path, moments: str) -> None:
    seed = secrets.randbits(30)
    print(f"seed {seed}")
    precision = {"dtype": "bf16", "moments_dtype": moments}
    plan = Plan(dtype="bf16")
    on_device, on_host, stored = (
        train(device, 3, plan, seed, precision=precision, offload=section(tiers, tmp_path))
        for tiers in ({}, {"optimizer": "host"}, {"optimizer": "nvme"})
    )
    assert_same(stored, on_host)
    assert_near(on_host, on_device, TOLERANCE["bf16"])


def test_delayed_updates_follow_the_cpus(device: torch.device) -> None:
    seed = secrets.randbits(30)
    print(f"seed {seed}")
    offload = {"optimizer": "host", "grads": "host", "update_mode": "delayed"}
    plan = Plan(steps=5)
    found = train(device, 2, plan, seed, offload=offload)
    assert_near(found, train(torch.device("cpu"), 2, plan, seed, offload=offload), TOLERANCE["fp32"])


def test_tied_weights(device: torch.device, tmp_path: Path) -> None:
    seed = secrets.randbits(30)
    print(f"seed {seed}")

    def tied() -> TinyModel:
        return TinyModel(tied=True)

    reference = train(device, 3, Plan(), seed, tied, offload=section({"optimizer": "host"}, tmp_path))
    offload = section({"optimizer": "host", "grads": "host", "params": "nvme"}, tmp_path)
    assert_same(train(device, 3, Plan(), seed, tied, offload=offload), reference)
