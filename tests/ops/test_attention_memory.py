"""Memory of block-sparse attention: what its documentation says; nothing that grows with length squared."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOKENS, HEADS, DIM, THREADS = 8192, 4, 64, 2

# Prints by how much a forward and backward raise the high-water mark. A short one before pays for what stays.
PROGRAM = f"""
import torch
from benchmarks.harness import process_memory
from tests.ops.attention_reference import compressed
from zero_ext import ops

def rise(tokens, dtype):
    blocks = tokens // 64
    layout = compressed((torch.rand(1, blocks, blocks) < 8 / blocks) | torch.eye(blocks, dtype=torch.bool))
    rows = [torch.randn(1, {HEADS}, tokens, {DIM}).to(dtype).requires_grad_() for _ in range(3)]
    grad_output = torch.randn_like(rows[0])
    process_memory.return_free_pages()
    process_memory.reset_peak()
    before = process_memory.resident_bytes()
    output = ops.block_sparse_attention(*rows, *layout, block=64, causal=True)
    gradients = torch.autograd.grad(output, rows, grad_output)
    return process_memory.peak_bytes() - before

torch.set_num_threads({THREADS})
for dtype in (torch.float32, torch.bfloat16):
    rise(512, dtype)
    print(rise({TOKENS}, dtype))
"""


def documented_bytes(element: int) -> int:
    """Output, logsumexp and gradients; for each thread a head's sums of keys and values, and tiles."""
    rows = HEADS * TOKENS
    results = 4 * rows * DIM * element + 4 * rows
    tiles = 11 * 64 * DIM + 7 * 64 * 64
    return results + THREADS * (8 * TOKENS * DIM + 4 * tiles)


def test_memory_is_what_is_documented() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for element, found in zip((4, 2), done.stdout.split(), strict=True):
        wanted = documented_bytes(element)
        assert abs(int(found) / wanted - 1) < 0.1, f"{element} bytes an element: {found}, documented {wanted}"
