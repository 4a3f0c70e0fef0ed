"""Signs and blocks of integers: bytes that each op has to move, over its time, against the rate of a copy.

python -m benchmarks.gpu.compression [--device cuda] [--seconds 30] [--toy]
"""

from __future__ import annotations

import torch

from benchmarks.gpu.clock import Clock, Work
from benchmarks.gpu.options import parse
from benchmarks.gpu.result import Bar, Result, Times
from zero_ext import ops

COPY_SHARE = 0.8
CHUNKS = 8
FORMATS = {
    "int8, symmetric": ops.BlockFormat(bits=8, symmetric=True),
    "int4, asymmetric": ops.BlockFormat(bits=4, symmetric=False),
}
NOTE = (
    f"bfloat16 values, float32 errors and sums, {CHUNKS} chunks. Traffic: every buffer once, scales"
    " counted; rate: traffic over time, as a share of the copy's."
)


def onebit(count: int, device: torch.device) -> dict[str, tuple[int, Work]]:
    """Bytes moved and work of each op of signs on `count` elements."""
    share = count // CHUNKS
    message = ops.sign_payload_bytes(share)
    values = torch.randn(count, device=device).bfloat16()
    errors, sums, error = values.new_zeros(count, dtype=torch.float32), torch.zeros_like(values), None
    messages = torch.empty(CHUNKS * message, dtype=torch.uint8, device=device)
    summed, reduced = torch.zeros(share, device=device), messages.new_empty(message)
    error = torch.zeros_like(summed)
    ops.compress_1bit_(messages, errors, values, 1.0, CHUNKS)
    every = CHUNKS * message
    return {
        "compress_1bit_": (
            count * (2 + 4 + 4) + every,
            lambda: ops.compress_1bit_(messages, errors, values, 1.0, CHUNKS),
        ),
        "decompress_1bit_": (
            count * 2 + every,
            lambda: ops.decompress_1bit_(sums, messages, 1.0, False, CHUNKS),
        ),
        "sum_1bit_": (share * 4 + every, lambda: ops.sum_1bit_(summed, messages, 1 / CHUNKS, False)),
        "reduce_1bit_": (
            share * (4 + 4) + every + message,
            lambda: ops.reduce_1bit_(reduced, error, messages, 1 / CHUNKS),
        ),
    }


def integers(
    count: int, device: torch.device, name: str, block: ops.BlockFormat
) -> dict[str, tuple[int, Work]]:
    """The same of blocks of integers in the format `block`, called `name`."""
    share = count // CHUNKS
    message = block.payload_bytes(share)
    every = CHUNKS * message
    values = torch.randn(count, device=device).bfloat16()
    back, summed = torch.empty_like(values), torch.zeros(share, device=device)
    messages = torch.empty(every, dtype=torch.uint8, device=device)
    again = messages.new_empty(block.payload_bytes(share // CHUNKS) * CHUNKS)
    slices = messages.new_empty(CHUNKS * again.numel())
    order = list(reversed(range(CHUNKS)))
    ops.quantize_(messages, values, block, CHUNKS, order)
    ops.quantize_(slices, values, block, CHUNKS * CHUNKS, None)
    return {
        f"quantize_, {name}": (
            count * 2 + every,
            lambda: ops.quantize_(messages, values, block, CHUNKS, order),
        ),
        f"dequantize_, {name}": (
            count * 2 + every,
            lambda: ops.dequantize_(back, messages, block, CHUNKS),
        ),
        f"sum_quantized_, {name}": (
            share * 4 + every,
            lambda: ops.sum_quantized_(summed, messages, block, 1 / CHUNKS, False),
        ),
        f"requantize_, {name}": (
            slices.numel() + again.numel(),
            lambda: ops.requantize_(again, slices, block, block, 1 / CHUNKS, CHUNKS),
        ),
    }


def judge(times: dict[str, Times], moved: dict[str, int], count: int, result: Result) -> None:
    """The table and a bar for each op."""
    columns = ("op", "GB moved", "ms (range)", "GB/s", "of the copy's rate")
    rows = result.table(f"Compression of {count:,} elements", columns, NOTE)
    copied = times["copy"].rate(moved["copy"])
    for name, each in times.items():
        rate = each.rate(moved[name])
        share = rate / copied
        figures = [f"{moved[name] / 1e9:.3f}", each.milliseconds(), f"{rate / 1e9:.1f}", f"{share:.3f}"]
        rows.append([name, *figures])
        result.data[name] = {"seconds": each.seconds, "bytes": moved[name], "share_of_copy": share}
        if name != "copy":
            result.bars.append(Bar(f"{name}: share of the copy rate", share, COPY_SHARE))


def measure(device: torch.device, seconds: float, toy: bool) -> Result:
    """Every op at one size."""
    result = Result()
    count = 2**16 if toy else 2**28
    source = torch.randn(count, device=device).bfloat16()
    target = torch.empty_like(source)
    works: dict[str, tuple[int, Work]] = {"copy": (2 * 2 * count, lambda: target.copy_(source))}
    works |= onebit(count, device)
    for name, block in FORMATS.items():
        works |= integers(count, device, name, block)
    times = Clock(device).in_turn({name: work for name, (_, work) in works.items()}, seconds, times=2)
    judge(times, {name: nbytes for name, (nbytes, _) in works.items()}, count, result)
    return result


if __name__ == "__main__":
    options = parse(__doc__)
    measure(options.device, options.seconds - 8, options.toy).finish()
