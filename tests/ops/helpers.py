"""Inputs and references shared by the op tests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor

from zero_ext import ops
from zero_ext.ops.load_library import ISA_NAMES

FLOAT_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def available_isas() -> list[str]:
    """Instruction sets this machine can run, found by asking for each."""
    available = []
    widest = ops.get_isa()
    for name in ISA_NAMES:
        with contextlib.suppress(RuntimeError):
            ops.set_isa(name)
            available.append(name)
    ops.set_isa(widest)
    return available


def random_bits(count: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Values with uniformly random bit patterns: every exponent, subnormals, infinities and NaNs."""
    info = torch.iinfo(BITS[dtype])
    bits = torch.randint(info.min, info.max + 1, (count,), dtype=torch.int64, generator=generator)
    return bits.to(BITS[dtype]).view(dtype)


def same_values(first: Tensor, second: Tensor) -> bool:
    """Bitwise equality, except that any NaN equals any NaN."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    both_nan = first.isnan() & second.isnan()
    same_bits = first.view(BITS[first.dtype]) == second.view(BITS[second.dtype])
    return bool((both_nan | same_bits).all())


def assert_same_on_all_isas_and_threads(compute: Callable[[], list[Tensor]]) -> None:
    """Every instruction set, with one thread and with three, gives the same bits."""
    results = []
    threads = torch.get_num_threads()
    for name in available_isas():
        before = ops.set_isa(name)
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(compute())
        ops.set_isa(before)
    torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
