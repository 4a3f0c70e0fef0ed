"""The deepest model that PyTorch alone trains under a cap, with as little memory as it needs."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from benchmarks.gpu.gpt import GPTShape, build, tokens_for
from benchmarks.gpu.trial import cap_memory, peak_bytes
from benchmarks.peers.base import BETAS, EPSILON, LEARNING_RATE, WEIGHT_DECAY

STATE_BYTES = 16  # a parameter: weights, gradients and two moments in float32
STEPS = 2
MOST_TRIALS = 8
RECIPE = (
    "PyTorch alone: float32 parameters under bfloat16 autocast that keeps no casts, every block checkpointed,"
    " torch.optim.AdamW(foreach=False), one sequence a step, two steps, a fresh allocator for each depth"
)


def trains(shape: GPTShape, device: torch.device, cap: int) -> bool:
    """Whether two steps go through; running out of memory is the only error that means no."""
    try:
        if device.type == "cpu" and STATE_BYTES * shape.parameters > cap:
            raise torch.OutOfMemoryError("the CPU has no cap; its rehearsal goes by the formula")
        _train(shape, device)
    except torch.OutOfMemoryError:
        return False
    return True


def _train(shape: GPTShape, device: torch.device) -> None:
    model = build(shape, device, torch.float32, checkpointing=True)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=LEARNING_RATE,
        betas=BETAS,
        eps=EPSILON,
        weight_decay=WEIGHT_DECAY,
        foreach=False,
    )
    for number in range(STEPS):
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
            loss = model(tokens_for(shape, 1, number, device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    loss.item()


def deepest(start: int, works: Callable[[int], bool]) -> tuple[int, int]:
    """(the largest depth that works, trials made), step by step from a guess; 0 if none of them works."""
    low, high, depth, trials = 0, 0, max(start, 1), 0
    while trials < MOST_TRIALS and depth > low:
        trials += 1
        if works(depth):
            low = depth
        else:
            high = depth
        if high and high - low <= 1:
            break
        depth = (low + high) // 2 if low and high else depth + 1 if low else depth - 1
    return low, trials


def plain_limit(
    of: Callable[[int], GPTShape], device: torch.device, cap: int
) -> tuple[GPTShape | None, int, int]:
    """(deepest shape that trained, trials, most bytes its tensors took); `of` makes a shape of a depth."""
    cap_memory(device, cap)
    peaks: dict[int, int] = {0: 0}

    def works(depth: int) -> bool:
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        found = trains(of(depth), device, cap)
        peaks[depth] = peak_bytes(device)
        gc.collect()
        return found

    one = of(1)
    guess = int((cap / STATE_BYTES - one.end_parameters) / one.block_parameters)
    depth, trials = deepest(guess, works)
    return (of(depth) if depth else None), trials, peaks[depth]
