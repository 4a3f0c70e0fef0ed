"""Memory of a prepared model on the device against the plan."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_ext
from benchmarks.harness.process_memory import live_tensor_bytes
from tests.zero.training import adamw
from zero_ext import ops
from zero_ext.plan import TrainingState, model_state_bytes
from zero_ext.zero import engine_of

WIDTH, LAYERS = 512, 6
TOLERANCE, SLACK = 0.03, 4 << 20
OFFLOADS: list[dict[str, Any]] = [
    {},
    {"optimizer": "host", "grads": "host"},
    {"optimizer": "nvme", "params": "host", "grads": "host"},
]


def model() -> nn.Sequential:
    """Blocks of one size."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def held(device: torch.device) -> int:
    """Bytes of live tensors on the device; elsewhere of all."""
    gc.collect()
    if device.type != "cuda":
        return live_tensor_bytes()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("offload", OFFLOADS, ids=lambda tiers: "+".join(tiers) or "device")
@pytest.mark.parametrize("stage", [2, 3])
def test_device_bytes_equal_the_breakdown(
    device: torch.device, tmp_path: Path, stage: int, offload: dict[str, Any]
) -> None:
    if stage < 3 and "params" in offload:
        offload = {**offload, "params": "device"}
    paths = {"nvme_paths": [str(tmp_path)]} if "nvme" in offload.values() else {}
    config = {
        "stage": stage,
        "precision": {"dtype": "bf16"},
        "offload": {"staging_buffer_bytes": 1 << 20, **offload, **paths},
    }
    # cuBLAS allocates its workspace at its first product.
    probe = torch.randn(64, WIDTH, device=device, requires_grad=True)
    (probe @ probe.T).sum().backward()
    (probe.bfloat16() @ probe.bfloat16().T).sum().backward()
    probe.grad = None
    before, host_before = held(device), ops.host_buffer_bytes()
    source = model().to(device)
    prepared, optimizer = zero_ext.prepare(source, adamw(source.parameters()), config)
    del source
    for _ in range(2):
        prepared(torch.randn(8, WIDTH, device=device).bfloat16()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    engine = engine_of(prepared)
    breakdown = engine.memory_breakdown()
    grown = held(device) - before + ops.host_buffer_bytes() - host_before
    if device.type != "cuda":
        # Host buffers are tensors of the same device there.
        grown = held(device) - before
    assert abs(grown - sum(breakdown.values())) <= TOLERANCE * sum(breakdown.values()) + SLACK
    if not offload:
        elements = sum(unit.layout.numel for unit in engine.units)
        planned = model_state_bytes(stage, 1, TrainingState({"bf16": elements}))
        state = breakdown["params"] + breakdown["grads"] + breakdown["optimizer"]
        assert abs(state - planned.total) <= TOLERANCE * planned.total


def test_a_second_hundred_steps_use_no_more(device: torch.device) -> None:
    source = model().to(device)
    config = {"stage": 3, "precision": {"dtype": "bf16"}, "offload": {"optimizer": "host", "grads": "host"}}
    prepared, optimizer = zero_ext.prepare(source, adamw(source.parameters()), config)
    peaks = []
    for _ in range(3):
        for _ in range(10):
            prepared(torch.randn(8, WIDTH, device=device).bfloat16()).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        peaks.append(torch.cuda.memory_reserved() if device.type == "cuda" else ops.host_buffer_bytes())
    assert peaks[2] <= peaks[1] + (1 << 16)
