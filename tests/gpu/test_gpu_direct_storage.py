"""Parameters and gradients that reach the GPU from NVMe by cuFile, where this machine has it."""

from __future__ import annotations

import logging
import secrets
import warnings
from pathlib import Path

import pytest
import torch

from tests.gpu.helpers import assert_same, train
from tests.zero.training import Plan

ON_NVME = {"params": "nvme", "grads": "nvme", "optimizer": "host", "staging_buffer_bytes": 1 << 20}


def test_direct_storage_changes_no_bit(
    device: torch.device, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Which way the bytes went, and why not directly, is among the warnings that pytest shows."""
    seed = secrets.randbits(30)
    print(f"seed {seed}")
    offload = {**ON_NVME, "nvme_paths": [str(tmp_path)]}
    wanted = train(device, 3, Plan(), seed, offload=offload)
    assert not caplog.messages
    with caplog.at_level(logging.INFO, "zero_ext.offload.nvme.gpu_direct_storage"):
        found = train(device, 3, Plan(), seed, offload=offload, aio={"gpu_direct_storage": "auto"})
    assert_same(found, wanted)
    if device.type == "cpu":  # storage reads into the memory itself
        assert not caplog.messages
        return
    (line,) = caplog.messages
    warnings.warn(line, stacklevel=1)
    direct = found[2].tiers.staging_bytes()["host"] < wanted[2].tiers.staging_bytes()["host"]
    assert direct == ("go directly, by cuFile" in line)
