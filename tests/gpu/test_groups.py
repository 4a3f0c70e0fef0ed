"""A process group of the device's own backend with one rank in it."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.gpu.helpers import assert_same, train
from tests.zero.training import Plan


@pytest.fixture
def world(device: torch.device) -> Iterator[None]:
    """NCCL on a GPU, gloo elsewhere."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_trains_as_without_a_group(device: torch.device, world: None, stage: int) -> None:
    plan = Plan(dtype="bf16", clip=0.1)
    with_group = train(device, stage, plan, 5)
    dist.barrier()
    dist.destroy_process_group()
    try:
        assert_same(with_group, train(device, stage, plan, 5))
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
