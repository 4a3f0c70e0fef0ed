"""The worker of test_network.py: a rank that tells how it is joined to the others, and sends messages."""

from __future__ import annotations

import datetime
import os
import time

import torch
import torch.distributed as dist

from benchmarks.harness.worker import main
from zero_ext.comm import fastest_host_transport


class Rank:
    def join(self) -> dict[str, object]:
        """Which exchange is chosen among all ranks, and among those of this node."""
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
        self.rank, local = dist.get_rank(), int(os.environ["LOCAL_WORLD_SIZE"])
        nodes = [list(range(first, first + local)) for first in range(0, dist.get_world_size(), local)]
        of_node = [dist.new_group(ranks) for ranks in nodes][self.rank // local]
        self.world = fastest_host_transport(dist.group.WORLD, 60.0)
        inside = fastest_host_transport(of_node, 60.0)
        return {"world": type(self.world).__name__, "node": type(inside).__name__}

    def send(self, source: int, target: int, nbytes: int) -> float:
        """Sends from rank to rank, over the sockets of the world; seconds until it has arrived everywhere."""
        tensor = torch.full((nbytes,), self.rank, dtype=torch.uint8)
        dist.barrier()
        began = time.monotonic()
        works = []
        if self.rank == source:
            works = self.world.start([(target, tensor)], [])
        elif self.rank == target:
            works = self.world.start([], [(source, tensor)])
        for work in works:
            work.wait()
        assert self.rank != target or tensor.unique().tolist() == [source]
        return time.monotonic() - began


if __name__ == "__main__":
    main(Rank(), ("join", "send"))
