"""Copy rates of the device and of the bus: the ceilings that the other figures are held against.

python -m benchmarks.gpu.copies [--device cuda] [--seconds 20] [--toy]
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from benchmarks.gpu.clock import Clock
from benchmarks.gpu.options import parse
from benchmarks.gpu.result import Result, Times
from zero_ext import ops

NOTE = (
    "Bytes read and written for the copy on the device, bytes moved once for the bus. Pinned: pages of this"
    " library's host buffers, registered with CUDA; pageable: the same copy from memory that is not."
)


@contextmanager
def pinned(nbytes: int, device: torch.device) -> Iterator[torch.Tensor]:
    """uint8 [nbytes] of host memory, page-locked where `device` is a GPU until the block ends."""
    buffer = ops.host_buffer(nbytes).fill_(1)
    if device.type != "cuda":
        yield buffer
        return
    runtime = torch.cuda.cudart()
    torch.cuda.check_error(runtime.cudaHostRegister(buffer.data_ptr(), nbytes, 0))
    try:
        yield buffer
    finally:
        torch.cuda.synchronize(device)
        torch.cuda.check_error(runtime.cudaHostUnregister(buffer.data_ptr()))


class Bidirectional:
    """Copies up on the current stream and down on one of its own, at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, up: tuple[torch.Tensor, torch.Tensor], down: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Each pair is (into, source)."""
        if self._side is None:
            up[0].copy_(up[1])
            down[0].copy_(down[1])
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            down[0].copy_(down[1], non_blocking=True)
        up[0].copy_(up[1], non_blocking=True)
        torch.cuda.current_stream().wait_stream(self._side)


def measure(device: torch.device, seconds: float, toy: bool) -> Result:
    """Rates of copies on the device, up, down, both ways at once, and from pageable memory."""
    nbytes = 2**20 if toy else 2**30
    near, far = (torch.randint(255, (nbytes,), dtype=torch.uint8, device=device) for _ in range(2))
    pageable = torch.zeros(nbytes // 4, dtype=torch.uint8)
    both = Bidirectional(device)
    with pinned(nbytes, device) as first, pinned(nbytes, device) as second:
        contenders = {
            "on the device": lambda: far.copy_(near),
            "host to device, pinned": lambda: near.copy_(first, non_blocking=True),
            "device to host, pinned": lambda: second.copy_(far, non_blocking=True),
            "both ways at once, pinned": lambda: both.copy((near, first), (second, far)),
            "host to device, pageable": lambda: near[: nbytes // 4].copy_(pageable),
        }
        times = Clock(device).in_turn(contenders, seconds)
    moved = dict(zip(times, (2 * nbytes, nbytes, nbytes, 2 * nbytes, nbytes // 4), strict=True))
    return report(times, moved)


def report(times: dict[str, Times], moved: dict[str, int]) -> Result:
    """The table."""
    result = Result()
    rows = result.table("Copy rates", ("copy", "GB moved", "ms (range)", "GB/s"), NOTE)
    for name, each in times.items():
        rate = each.rate(moved[name])
        rows.append([name, f"{moved[name] / 1e9:.2f}", each.milliseconds(), f"{rate / 1e9:.1f}"])
        result.data[name] = {"bytes": moved[name], "seconds": each.seconds, "bytes_per_second": rate}
    result.line = ", ".join(f"{row[0]} {row[3]} GB/s" for row in rows[:3])
    return result


if __name__ == "__main__":
    options = parse(__doc__)
    measure(options.device, options.seconds - 5, options.toy).finish()
