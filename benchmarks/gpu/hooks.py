"""What the hooks of a prepared model add to forward and backward on one rank."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.gpu.clock import Clock
from benchmarks.gpu.result import Bar, Result
from benchmarks.gpu.trainers import Loop, Plain, ZeroExt

MOST_OVERHEAD = 1.02
NOTE = (
    "Forward, backward and the end of the gradients, without an optimizer step, in turn on the host's clock"
    " until the device has finished. Ratio: the median of the rounds'."
)


def passes(trainer: Loop, ids: torch.Tensor) -> Callable[[], None]:
    """Forward and backward of `trainer`, whose gradients then go."""

    def once() -> None:
        trainer.backward(ids)
        trainer.clear()

    return once


def measure_hooks(
    plain: Plain,
    prepared: dict[str, ZeroExt],
    ids: torch.Tensor,
    clock: Clock,
    seconds: float,
    result: Result,
) -> float:
    """Adds the table and the bars; seconds of the plain model's forward and backward."""
    contenders = {name: passes(trainer, ids) for name, trainer in {"plain model": plain, **prepared}.items()}
    times = clock.in_turn(contenders, seconds, wall=True)
    rows = result.table("Forward and backward with and without hooks", ("model", "ms (range)", "ratio"), NOTE)
    base = times["plain model"]
    for name, each in times.items():
        ratio = base.against(each)
        rows.append([name, each.milliseconds(), f"{ratio:.4f}"])
        result.data[f"forward and backward, {name}"] = {"seconds": each.seconds, "ratio": ratio}
        if name in prepared:
            result.bars.append(Bar(f"hooks, {name} / plain model", ratio, MOST_OVERHEAD, most=True))
    return base.median
