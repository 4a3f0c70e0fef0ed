"""Parameters that follow the master weights of one chunk of state in storage."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zero_ext.offload import ShardHome, put


def send_chunk(
    output: ShardHome | None,
    begin: int,
    master: torch.Tensor,
    stepped: Sequence[tuple[int, int]],
    room: torch.Tensor,
) -> None:
    """Sends the master weights ``master`` [n] of the elements from ``begin`` on, of which the ranges in
    ``stepped`` changed, to the parameters ``output``; ``room`` is memory for them on their way to storage."""
    if output is None:
        return
    if output.tier == "nvme":
        # Parameters in storage follow the masters everywhere: one write, of whole blocks.
        run = room[: master.numel() * output.dtype.itemsize].view(output.dtype)
        output.store(begin, run.copy_(master), "host")
        return
    for first, last in stepped:
        put(output, begin + first, master[first:last], "host")
