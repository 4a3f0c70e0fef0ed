"""Bytes of optimizer state in storage, against the extents that the engine's stream makes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from zero_ext import ops
from zero_ext.offload.nvme.nvme_store import NvmeStore
from zero_ext.plan.simulation import Training
from zero_ext.plan.simulation.run_memory import stored_state_bytes

HANDLE = 7001


@pytest.mark.parametrize(
    ("optimizer", "moments"),
    [("AdamW", "fp32"), ("AdamW", "bf16"), ("AdamW", "8bit"), ("Lion", "fp32"), ("Muon", "bf16")],
)
def test_extents_of_state_are_the_engine_s(optimizer: str, moments: str, tmp_path: Path) -> None:
    seed = random.randrange(2**31)
    print("seed", seed)
    chance = random.Random(seed)
    fields = Training(1, moments_dtype=moments, optimizer_type=optimizer).state_fields(optimizer)
    with NvmeStore([tmp_path]) as store:
        for ring in (1 << 20, 3_000_320, 64 << 20):
            ops.state_stream_open(HANDLE, store.handle, ring, *map(list, zip(*fields, strict=True)))
            try:
                chunk = ops.state_stream_chunk_elements(HANDLE)
                some = [chance.randrange(1, 5 * chunk) for _ in range(20)]
                for elements in (1, 2047, 2049, chunk - 1, chunk, chunk + 1, 3 * chunk, *some):
                    found = stored_state_bytes(elements, fields, ring)
                    assert found == ops.state_stream_extent_bytes(HANDLE, elements), (ring, elements)
            finally:
                ops.state_stream_close(HANDLE)
