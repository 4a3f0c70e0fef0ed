"""Parameters that follow the master weights of one chunk of state in storage."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zero_ext.offload import ShardStorage, put


def send_chunk(
    output: ShardStorage | None,
    begin: int,
    master: torch.Tensor,
    stepped: Sequence[tuple[int, int]],
    buffer: torch.Tensor,
) -> None:
    """Send the master weights ``master`` [n] of the elements from ``begin`` on to the parameters ``output``.

    The ranges in ``stepped`` changed. ``buffer`` holds parameters while they are sent to storage.
    """
    if output is None:
        return
    if output.tier == "nvme":
        # Parameters in storage follow the masters everywhere: one write, of whole blocks.
        values = buffer[: master.numel() * output.dtype.itemsize].view(output.dtype)
        output.store(begin, values.copy_(master), "host")
        return
    for first, last in stepped:
        put(output, begin + first, master[first:last], "host")
