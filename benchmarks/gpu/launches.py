"""Kernels of every family at full size, once each between the marks of CUDA's profiler: for Nsight Compute.

python -m benchmarks.gpu.launches [--device cuda] [--toy]
"""

from __future__ import annotations

import random

import torch

from benchmarks.gpu.attention import chosen_blocks, lists
from benchmarks.gpu.clock import Work
from benchmarks.gpu.options import parse
from benchmarks.gpu.shard import shard_of
from zero_ext import ops

BLOCK = 64  # tokens of a block of attention


def works(device: torch.device, toy: bool) -> dict[str, Work]:
    """What is launched, by name: each reads and writes far more than a cache holds, unless `toy`."""
    count, tokens = (1 << 16, 1024) if toy else (1 << 27, 16_384)
    shard, lion = shard_of(count, device), shard_of(count, device)
    grad = torch.randn(count, device=device).bfloat16()
    param = torch.empty_like(grad)
    first, second = (
        ops.quantize_blockwise(shard.exp_avg, True),
        ops.quantize_blockwise(shard.exp_avg_sq, False),
    )
    step = (shard.segments, shard.hyper, shard.scale)
    lion_row = torch.tensor([[1e-3, 0.9, 0.99, 0.1, 0.0]], dtype=torch.float64, device=device)
    chunks, offsets = list(grad.chunk(64)), [index * (count // 64) for index in range(64)]
    sums = torch.zeros(33, dtype=torch.int64, device=device)
    total = torch.zeros(count // 8, device=device)
    form = ops.BlockFormat(bits=8, symmetric=True)
    messages = torch.empty(form.payload_bytes(count), dtype=torch.uint8, device=device)
    packed = torch.empty(ops.sign_payload_bytes(count), dtype=torch.uint8, device=device)
    errors = torch.zeros(count, device=device)
    layout = lists(chosen_blocks(tokens // BLOCK, True, random.Random(0)), device)
    rows = [torch.randn(1, 8, tokens, 64, device=device, dtype=torch.bfloat16) for _ in range(3)]
    return {
        "adam": lambda: shard.update(grad, param),
        "adam 8-bit": lambda: ops.adam_step_8bit_(shard.master, first, second, grad, param, *step),
        "lion": lambda: ops.lion_step_(
            lion.master, lion.exp_avg, grad, param, lion.segments, lion_row, lion.scale
        ),
        "pack": lambda: ops.pack_(param, chunks, offsets),
        "sum of 8 shards": lambda: ops.sum_shards_(total, list(grad.chunk(8)), 0.125, False),
        "squared norm": lambda: ops.squared_norm_(grad, sums),
        "int8 blocks": lambda: ops.quantize_(messages, grad, form, 1, [0]),
        "signs": lambda: ops.compress_1bit_(packed, errors, grad, 1.0, 1),
        "attention": lambda: ops.block_sparse_attention(*rows, *layout, block=BLOCK, causal=True),
    }


def main() -> None:
    """Warms up, then launches each once."""
    options = parse(__doc__)
    on_gpu = options.device.type == "cuda"
    for name, work in works(options.device, options.toy).items():
        work()
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
        work()
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
        print(name, flush=True)


if __name__ == "__main__":
    main()
