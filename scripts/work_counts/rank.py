"""One of the two ranks whose work is counted: a process without settings from outside.

Run by `scripts.work_counts.measure` as python -m scripts.work_counts.rank RANK FOLDER
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from scripts.work_counts.counting import warm_up_torch
from scripts.work_counts.hot_paths import PATHS, count_path
from zero_ext.comm import cross_process_transport

RANKS = 2


def main(rank: int, folder: Path) -> None:
    """Count all paths; rank 0 prints its counts as JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    warm_up_torch()
    # It looks at the shared memory of all processes of the machine, and so depends on what else runs there.
    cross_process_transport.remove_abandoned_memory = list  # type: ignore[assignment]
    # Collections happen between phases alone: finalizers in the middle of one would change its count.
    gc.disable()
    found = []
    for number, path in enumerate(PATHS):
        of_path = folder / str(number)
        of_path.mkdir(exist_ok=True)
        found.append(count_path(path, of_path))
    if rank == 0:
        counts = [{name: rows for each in found for name, rows in each[turn].items()} for turn in range(2)]
        print(json.dumps(counts))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
