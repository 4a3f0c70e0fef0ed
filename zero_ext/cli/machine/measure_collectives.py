"""One rank of the measurement of collectives: gathers as the engine makes them; torchrun starts it.

`python -m torch.distributed.run --nproc-per-node 2 -m zero_ext.cli.machine.measure_collectives RESULT BYTES`
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from zero_ext.comm import Collectives
from zero_ext.comm.process_group import join_world, make_collectives

_PASSES = 9
_SMALL_ELEMENTS = 4096
_TIMEOUT_SECONDS = 120.0


def gather_seconds(collectives: Collectives, elements: int, device: torch.device) -> float:
    """Return the median time of a gather of ``elements`` in 16 bits over all ranks."""
    flat = torch.zeros(elements, dtype=torch.bfloat16, device=device)
    shard = flat.chunk(collectives.world_size)[collectives.rank]
    seconds = []
    for _ in range(_PASSES):
        dist.barrier()
        begin = time.perf_counter()
        collectives.gather(flat, shard, "gather", "measurement").wait()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return median(seconds[1:])


def main(result: Path, nbytes: int) -> None:
    """Measure a large and a small gather; rank 0 writes bytes per second that a rank receives, and
    latency.
    """
    join_world(_TIMEOUT_SECONDS)
    device = torch.device("cpu")
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        kind = torch.accelerator.current_accelerator()
        device = torch.device(kind.type if kind is not None else "cpu", int(os.environ["LOCAL_RANK"]))
    collectives = make_collectives(None, _TIMEOUT_SECONDS, device)
    ranks = collectives.world_size
    elements = nbytes // 2 // ranks * ranks
    small = gather_seconds(collectives, _SMALL_ELEMENTS * ranks, device)
    large = gather_seconds(collectives, elements, device)
    received = 2 * (elements - _SMALL_ELEMENTS * ranks) * (ranks - 1) / ranks
    if collectives.rank == 0:
        found = {"bandwidth": received / max(large - small, 1e-9), "latency": small}
        result.write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
