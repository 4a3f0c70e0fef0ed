"""The benchmark of host time: what its contenders call, which no noise of the machine changes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks import host_time

LAYERS = 6


def calls_of(run: Callable[[], None]) -> Counter[str]:
    """How often ``run`` calls what, in Python and in C."""
    found: Counter[str] = Counter()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            found[frame.f_code.co_name if event == "call" else argument.__name__] += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def count() -> dict[str, Counter[str]]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=host_time.RANKS)
    runs = host_time.contenders(LAYERS)
    for run in runs.values():
        for _ in range(5):
            run()
    found = {name: calls_of(run) for name, run in runs.items()}
    dist.destroy_process_group()
    return found


def test_a_layer_takes_fewer_calls_than_fsdp2s_and_one_of_the_backend_for_a_collective() -> None:
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
