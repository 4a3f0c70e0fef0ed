"""Block-sparse attention against torch's dense flash attention and against FlexAttention.

python -m benchmarks.gpu.attention [--device cuda] [--seconds 150] [--toy]
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.clock import Clock, Work
from benchmarks.gpu.options import parse
from benchmarks.gpu.result import Bar, Budget, Result, Times
from zero_ext import ops

DENSE, FLEX = 6.0, 1.0
SHARE_OF_BLOCKS = 0.1
BLOCK = 64  # that of the bars; others are measured beside it
OTHER_BLOCKS = (16, 128)
OURS, FLASH = "zero_ext", "torch flash attention, all keys"
FLEX_BLOCKS = (128, 64)  # the larger first: its kernels are the faster ones where time runs out
FLEX_MODE = "max-autotune-no-cudagraphs"
FLEX_GRAPHS = 64  # each shape has one of its own for every block size, with and without gradients
SECONDS_TO_COMPILE = 30.0
NOTE = (
    "At most 10% of all blocks (causal: of those up to the diagonal): neighbors, the first"
    " column, and others at random. Dense attention has all keys. FlexAttention is compiled and has the same"
    " mask; the bar is the faster of its block sizes. Forward alone, and forward and backward of all three"
    " inputs; bfloat16."
)


@dataclass(frozen=True)
class Shape:
    """Sizes of one call."""

    batch: int
    heads: int
    tokens: int
    dim: int
    causal: bool
    block: int = BLOCK

    def name(self) -> str:
        """For tables."""
        kind = "causal" if self.causal else "both sides"
        heads = f"{self.batch * self.heads} heads of {self.dim}"
        return f"{self.tokens:,} tokens, {heads}, {kind}, blocks of {self.block}"


def chosen_blocks(blocks: int, causal: bool, generator: random.Random) -> Tensor:
    """Bool [blocks, blocks] with at most SHARE_OF_BLOCKS of those that could be seen."""
    most = int(SHARE_OF_BLOCKS * (blocks * (blocks + 1) // 2 if causal else blocks**2))
    each = 1
    while sum(min(row + 1 if causal else blocks, each + 1) for row in range(blocks)) <= most:
        each += 1
    mask = torch.zeros(blocks, blocks, dtype=torch.bool)
    for row in range(blocks):
        last = row if causal else blocks - 1
        near = [position for position in range(row - each // 4, row + each // 4 + 1) if 0 <= position <= last]
        rest = [position for position in range(last + 1) if position not in {0, row, *near}]
        generator.shuffle(rest)
        order = list(dict.fromkeys([row, 0, *near, *rest]))
        mask[row, order[:each]] = True
    return mask


def lists(mask: Tensor, device: torch.device) -> list[Tensor]:
    """The layout as the op takes it: by rows, then by columns."""
    found = []
    for each in (mask, mask.t()):
        ends = each.sum(1).cumsum(0)
        pointers = torch.cat([ends.new_zeros(1), ends])[None]
        found += [pointers.int().to(device), each.nonzero()[:, 1].int().to(device)]
    return found


def flex(shape: Shape, mask: Tensor, block: int, device: torch.device) -> Callable[..., Any]:
    """FlexAttention over the same mask, its tables in blocks of `block` tokens."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    there = mask.to(device)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        inside = there[query // shape.block, key // shape.block]
        return inside & (query >= key) if shape.causal else inside

    table = create_block_mask(
        sees, None, None, shape.tokens, shape.tokens, device=str(device), BLOCK_SIZE=block, _compile=True
    )
    # Past 8 graphs torch would compute all scores without compiling; a whole graph or an error.
    torch._dynamo.config.recompile_limit = FLEX_GRAPHS
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False, mode=FLEX_MODE)
    # With its block size given, all numbers of stages and warps are tried; without, one pair for 64.
    tiles: Any = {"BLOCK_M": 64, "BLOCK_N": 64} if block == 64 else None
    return partial(compiled, block_mask=table, kernel_options=tiles)


def dense(shape: Shape, device: torch.device) -> Callable[..., Tensor]:
    """torch's flash attention, with no other kernel to fall back to."""

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(query, key, value, is_causal=shape.causal)

    return call


def works(attention: Callable[..., Tensor], rows: Sequence[Tensor], grad: Tensor) -> tuple[Work, Work]:
    """Forward without gradients, and forward with backward."""

    def forward() -> None:
        with torch.no_grad():
            attention(*rows)

    def both() -> None:
        torch.autograd.grad(attention(*rows), rows, grad)

    return forward, both


def contenders(
    shape: Shape, device: torch.device, budget: Budget, result: Result
) -> dict[str, tuple[Work, Work]]:
    """Everyone who runs on this device, each tried once; those that compile only while there is time."""
    mask = chosen_blocks(shape.tokens // shape.block, shape.causal, random.Random(0))
    layout = lists(mask, device)
    size = (shape.batch, shape.heads, shape.tokens, shape.dim)
    query, key, value = (
        torch.randn(size, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    grad = torch.randn(size, device=device, dtype=torch.bfloat16)

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return ops.block_sparse_attention(query, key, value, *layout, block=shape.block, causal=shape.causal)

    found: dict[str, tuple[Work, Work]] = {}
    made: dict[str, Callable[[], Callable[..., Tensor]]] = {
        OURS: lambda: ours,
        FLASH: lambda: dense(shape, device),
    }
    if device.type == "cuda":
        for block in FLEX_BLOCKS:
            made[f"FlexAttention, blocks of {block}"] = partial(flex, shape, mask, block, device)
    else:
        result.left_out.append(f"FlexAttention: {device.type} has no backward of it")
    for name, make in made.items():
        if name not in (OURS, FLASH) and budget.left() < SECONDS_TO_COMPILE:
            result.left_out.append(f"{name}, {shape.name()}: {budget.left():.0f} s are left")
            continue
        with result.attempt(f"{name}, {shape.name()}", own=name == OURS):
            pair = works(make(), (query, key, value), grad)
            pair[1]()
            found[name] = pair
    return found


def judge(shape: Shape, what: str, times: dict[str, Times], rows: list[list[str]], result: Result) -> None:
    """Lines of the table, and the bars of forward and backward together."""
    mine = times[OURS]
    for name, each in times.items():
        rows.append([shape.name(), what, name, each.milliseconds(), f"{mine.against(each):.2f}"])
    result.data[f"{shape.name()}, {what}"] = {name: each.seconds for name, each in times.items()}
    if FLASH in times:
        bar = Bar(f"{FLASH} / zero_ext, {shape.name()}, {what}", mine.against(times[FLASH]), DENSE)
        result.bars.append(bar)
    peers = [each for name, each in times.items() if name.startswith("FlexAttention")]
    if peers:
        best = min(peers, key=lambda each: each.median)
        result.bars.append(Bar(f"FlexAttention / zero_ext, {shape.name()}, {what}", mine.against(best), FLEX))


def measure(device: torch.device, seconds: float, toy: bool) -> Result:
    """Both masks at two head dims."""
    result = Result()
    columns = ("shape", "what", "contender", "ms (range)", "times zero_ext's")
    rows = result.table("Block-sparse attention", columns, NOTE)
    heads = {16: 1} if toy else {64: 24, 128: 12}
    shapes = [
        Shape(1, count, 1024 if toy else 16_384, dim, causal)
        for dim, count in heads.items()
        for causal in (False, True)
    ]
    shapes += [replace(shapes[1], block=block) for block in OTHER_BLOCKS]
    budget = Budget(seconds)
    for number, shape in enumerate(shapes):
        found = contenders(shape, device, budget, result)
        if OURS not in found:
            continue
        share = budget.left() / (2 * (len(shapes) - number))
        for index, what in enumerate(("forward", "forward and backward")):
            times = Clock(device).in_turn({name: pair[index] for name, pair in found.items()}, share)
            judge(shape, what, times, rows, result)
        result.report()
    return result


if __name__ == "__main__":
    options = parse(__doc__)
    measure(options.device, options.seconds - 8, options.toy).finish()
