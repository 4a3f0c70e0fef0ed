"""The benchmark of host time: what its contenders call, which no noise of the machine changes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import torch.distributed as dist

from benchmarks import host_time

LAYERS = 6


def count() -> dict[str, Counter[str]]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=host_time.RANKS)
    found = {name: host_time.calls_of(run) for name, run in host_time.warmed_up(LAYERS).items()}
    dist.destroy_process_group()
    return found


def test_a_layer_needs_fewer_calls_than_fsdp2s_and_one_of_the_backend_for_a_collective() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.test_host_time"],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = {name: Counter(calls) for name, calls in json.loads(done.stdout).items()}
    totals = {name: calls.total() for name, calls in found.items()}
    added = {name: (totals[name] - totals["plain"]) / LAYERS for name in ("zero_ext", "fsdp2")}
    assert added["zero_ext"] <= host_time.BAR * added["fsdp2"], added
    own = found["zero_ext"]
    # Forward keeps what backward needs first, and may have it begun.
    assert 2 * LAYERS - 1 <= own["_allgather_base"] <= 2 * LAYERS
    assert own["alltoall"] == LAYERS
    assert own["send"] == own["recv"] == 0


if __name__ == "__main__":
    print(json.dumps(count()))
