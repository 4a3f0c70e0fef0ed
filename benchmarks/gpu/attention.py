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
WHAT = ("forward", "forward and backward")
# Block sizes of its tables and modes of torch.compile, those first that are the faster ones where time runs
# out. To try all kernels of a shape takes minutes, torch's own table of kernels for this GPU seconds.
FLEX_VARIANTS = ((128, "default"), (64, "default"), (128, "max-autotune-no-cudagraphs"))
FLEX_GRAPHS = 64  # each shape has one of its own for every variant, with and without gradients
SECONDS_TO_COMPILE = {"default": 20.0, "max-autotune-no-cudagraphs": 240.0}
SHARE_OF_DENSE = 0.2  # of the time
NOTE = (
    "At most 10% of all blocks (causal: of those up to the diagonal): neighbors, the first"
    " column, and others at random. Dense attention has all keys. FlexAttention is compiled and has the same"
    " mask, in a turn of its own with ours; the bar is its fastest variant. Forward alone, and forward and"
    " backward of all three inputs; bfloat16."
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


def flex(shape: Shape, mask: Tensor, block: int, mode: str, device: torch.device) -> Callable[..., Any]:
    """FlexAttention over the same mask, its tables in blocks of `block` tokens, compiled in `mode`."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    there = mask.to(device)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        inside = there[query // shape.block, key // shape.block]
        return inside & (query >= key) if shape.causal else inside

    table = create_block_mask(
        sees, None, None, shape.tokens, shape.tokens, device=str(device), BLOCK_SIZE=block
    )
    # Past 8 graphs torch would compute all scores without compiling; a whole graph or an error.
    torch._dynamo.config.recompile_limit = FLEX_GRAPHS
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False, mode=mode)
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


class Call:
    """One shape: inputs, a mask, and what is to be timed of each contender."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.mask = chosen_blocks(shape.tokens // shape.block, shape.causal, random.Random(0))
        self._layout = lists(self.mask, device)
        size = (shape.batch, shape.heads, shape.tokens, shape.dim)
        self._rows = [
            torch.randn(size, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
        ]
        self._grad = torch.randn(size, device=device, dtype=torch.bfloat16)
        self.works: dict[str, tuple[Work, Work]] = {}

    def ours(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """This library's attention."""
        block, causal = self.shape.block, self.shape.causal
        return ops.block_sparse_attention(query, key, value, *self._layout, block=block, causal=causal)

    def add(self, name: str, attention: Callable[..., Tensor], result: Result) -> bool:
        """Tries a contender once; False if it fails."""
        with result.attempt(f"{name}, {self.shape.name()}", own=name == OURS):
            pair = works(attention, self._rows, self._grad)
            for work in pair:
                work()
            self.works[name] = pair
        return name in self.works

    def measure(self, names: Sequence[str], seconds: float) -> list[dict[str, Times]]:
        """Times of those contenders: forward, then forward and backward."""
        clock = Clock(self.device)
        return [
            clock.in_turn({name: self.works[name][index] for name in names}, seconds / 2)
            for index in range(len(WHAT))
        ]


def note(call: Call, what: str, times: dict[str, Times], rows: list[list[str]], result: Result) -> None:
    """Lines of the table."""
    shape, mine = call.shape.name(), times[OURS]
    for name, each in times.items():
        rows.append([shape, what, name, each.milliseconds(), f"{mine.against(each):.2f}"])
    result.data.setdefault(f"{shape}, {what}", []).append(
        {name: each.seconds for name, each in times.items()}
    )


def measure_dense(calls: Sequence[Call], seconds: float, rows: list[list[str]], result: Result) -> None:
    """Ours against dense attention in every shape, which takes seconds."""
    for call in calls:
        if not call.add(OURS, call.ours, result):
            continue
        call.add(FLASH, dense(call.shape, call.device), result)
        for what, times in zip(WHAT, call.measure(list(call.works), seconds / len(calls)), strict=True):
            note(call, what, times, rows, result)
            if FLASH in times:
                ratio = times[OURS].against(times[FLASH])
                result.bars.append(Bar(f"{FLASH} / zero_ext, {call.shape.name()}, {what}", ratio, DENSE))
        result.report()


def measure_flex(calls: Sequence[Call], budget: Budget, rows: list[list[str]], result: Result) -> None:
    """Ours against every variant of FlexAttention that there is time to compile, the first in all shapes."""
    ratios: dict[str, float] = {}
    dense_bars = len(result.bars)
    for number, (block, mode) in enumerate(FLEX_VARIANTS):
        for call in calls:
            name = f"FlexAttention, {mode}, blocks of {block}"
            if OURS not in call.works:
                continue
            if budget.left() < SECONDS_TO_COMPILE[mode]:
                result.left_out.append(f"{name}, {call.shape.name()}: {budget.left():.0f} s are left")
                continue
            if not call.add(name, flex(call.shape, call.mask, block, mode, call.device), result):
                continue
            share = budget.left() / (8 * len(calls) * (len(FLEX_VARIANTS) - number))
            for what, times in zip(WHAT, call.measure((OURS, name), share), strict=True):
                note(call, what, times, rows, result)
                bar = f"FlexAttention / zero_ext, {call.shape.name()}, {what}"
                ratio = times[OURS].against(times[name])
                ratios[bar] = min(ratio, ratios.get(bar, ratio))
            result.bars[dense_bars:] = [Bar(bar, ratio, FLEX) for bar, ratio in ratios.items()]
            result.report()


def measure(device: torch.device, seconds: float, toy: bool) -> Result:
    """Both masks at two head dims, then the other sizes of blocks."""
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
    budget, calls = Budget(seconds), [Call(shape, device) for shape in shapes]
    measure_dense(calls, SHARE_OF_DENSE * seconds, rows, result)
    if device.type == "cuda":
        measure_flex(calls, budget, rows, result)
    else:
        result.left_out.append(f"FlexAttention: {device.type} has no backward of it")
    return result


if __name__ == "__main__":
    options = parse(__doc__)
    measure(options.device, options.seconds - 8, options.toy).finish()
