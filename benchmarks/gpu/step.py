"""A training step of a 1.3B GPT: zero_ext in memory, on the host and on NVMe, against its peers.

python -m benchmarks.gpu.step [--device cuda] [--seconds 110] [--toy]
"""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.clock import Clock, Work
from benchmarks.gpu.gpt import TOY, XL, GPTShape, tokens_for
from benchmarks.gpu.hooks import measure_hooks
from benchmarks.gpu.options import parse
from benchmarks.gpu.overlap import measure_overlap
from benchmarks.gpu.result import Budget, Result, Times
from benchmarks.gpu.trainers import DeepSpeed, Fsdp2, Plain, ZeroExt
from benchmarks.harness.statistics import agree
from benchmarks.peers.base import nvme_folder

BATCH = 8
STATE_BYTES = 12  # a parameter, on NVMe
# Shares of the time that is there when each part begins.
SHARE_OF_HOOKS, SHARE_OF_STEPS = 0.25, 0.5
NVME_STEPS, SECONDS_TO_PREPARE, PROBE_BYTES = 2, 10.0, 2**28
NOTE = (
    "bfloat16 parameters (FSDP2 and the plain loop: compute), float32 masters, AdamW, clipped to norm 1, in"
    " turn on the host's clock until the device has finished. TFLOP/s: 6 operations a weight and token and"
    " causal attention. State on the host: 16 bytes a parameter of pinned memory, gradients included."
)


class Steps:
    """Contenders that stay resident, with the losses of their first steps."""

    def __init__(self, shape: GPTShape, device: torch.device, batch: int, result: Result) -> None:
        self.shape, self.device, self.batch, self.result = shape, device, batch, result
        self.trainers: dict[str, Any] = {}
        self.losses: dict[str, list[float]] = {}
        self._number = 0

    def start(self, name: str, make: Callable[[GPTShape, torch.device], Any], own: bool) -> None:
        """Builds a contender and makes two steps."""
        with self.result.attempt(name, own):
            trainer = make(self.shape, self.device)
            ids = [tokens_for(self.shape, self.batch, step, self.device) for step in range(2)]
            self.losses[name] = [float(trainer.step(each)) for each in ids]
            self.trainers[name] = trainer

    def work(self, name: str) -> Work:
        """A step of `name` on the next tokens."""
        trainer = self.trainers[name]

        def once() -> None:
            self._number += 1
            trainer.step(tokens_for(self.shape, self.batch, self._number, self.device))

        return once

    def report(self, times: dict[str, Times], title: str) -> None:
        """A table of `times`, the first being the one that ratios refer to."""
        columns = ("contender", "ms a step (range)", "TFLOP/s", "time against the first", "losses agree")
        rows = self.result.table(title, columns, NOTE)
        operations = self.shape.operations(self.batch * self.shape.positions)
        first = next(iter(times))
        for name, each in times.items():
            rate, ratio = operations / each.median / 1e12, times[first].against(each)
            same = agree(self.losses[name], self.losses[first]) if first in self.losses else True
            rows.append([name, each.milliseconds(), f"{rate:.1f}", f"{ratio:.3f}", "yes" if same else "NO"])
            self.result.data[name] = {
                "seconds": each.seconds,
                "teraflops": rate,
                "ratio": ratio,
                "losses": self.losses.get(name, []),
            }


def in_memory(shape: GPTShape, device: torch.device) -> ZeroExt:
    """Everything on the device."""
    return ZeroExt(shape, device)


def on_host(shape: GPTShape, device: torch.device) -> ZeroExt:
    """ZeRO-Offload's placement."""
    return ZeroExt(shape, device, optimizer="host", grads="host")


def on_nvme(shape: GPTShape, device: torch.device) -> ZeroExt:
    """Optimizer state on NVMe, gradients in host memory."""
    return ZeroExt(shape, device, optimizer="nvme", grads="host")


def measure(device: torch.device, seconds: float, toy: bool) -> Result:
    """Hooks, steps, overlap, and NVMe if there is time and room."""
    budget, result, clock = Budget(seconds), Result(), Clock(device)
    steps = Steps(TOY if toy else XL, device, 2 if toy else BATCH, result)
    steps.start("plain loop, torch fused AdamW", Plain, own=False)
    steps.start("zero_ext 3 in memory", in_memory, own=True)
    compute = measure_added_hooks(steps, clock, SHARE_OF_HOOKS * budget.left())
    result.report()
    steps.start("zero_ext 3, optimizer and gradients on the host", on_host, own=True)
    steps.start("FSDP2, one rank", Fsdp2, own=False)
    if importlib.util.find_spec("deepspeed") is None:
        result.left_out.append("DeepSpeed: not installed")
    else:
        steps.start("DeepSpeed 3 in memory", DeepSpeed, own=False)
    contenders = {name: steps.work(name) for name in steps.trainers}
    times = clock.in_turn(contenders, SHARE_OF_STEPS * budget.left(), wall=True)
    steps.report(times, f"A step of {steps.shape.name}, {steps.batch} × {steps.shape.positions} tokens")
    if compute is not None:
        measure_offload(steps, times, compute, clock)
    result.report()
    contenders.clear()
    steps.trainers.clear()
    gc.collect()
    measure_nvme(steps, clock, budget)
    return result


def measure_added_hooks(steps: Steps, clock: Clock, seconds: float) -> float | None:
    """Seconds of the plain forward and backward; None if one of both sides is not there."""
    plain = steps.trainers.get("plain loop, torch fused AdamW")
    prepared = steps.trainers.get("zero_ext 3 in memory")
    if plain is None or prepared is None:
        return None
    ids = tokens_for(steps.shape, steps.batch, 0, steps.device)
    return measure_hooks(plain, {"stage 3": prepared}, ids, clock, seconds, steps.result)


def measure_offload(steps: Steps, times: dict[str, Times], compute: float, clock: Clock) -> None:
    """What the step with its optimizer on the host hides."""
    name = "zero_ext 3, optimizer and gradients on the host"
    if name not in times:
        return
    trainer, seconds = steps.trainers[name], times[name].median
    with steps.result.attempt("overlap", own=True):
        measure_overlap(trainer, seconds, compute, steps.device, clock, steps.result)


def measure_nvme(steps: Steps, clock: Clock, budget: Budget) -> None:
    """The optimizer on NVMe: one step to warm up and one that counts, if storage is quick enough for both."""
    name, folder = "zero_ext 3, optimizer on NVMe", Path(nvme_folder())
    nbytes = STATE_BYTES * steps.shape.parameters
    free, rate = shutil.disk_usage(folder).free, written_per_second(folder)
    # Written once to begin with, read and written by each step.
    seconds = nbytes / rate * (1 + 2 * NVME_STEPS) + SECONDS_TO_PREPARE
    if free < 1.05 * nbytes or budget.left() < seconds:
        have = f"{free / 1e9:.1f} GB that take {rate / 1e9:.2f} GB/s and {max(budget.left(), 0.0):.0f} s"
        want = f"{nbytes / 1e9:.1f} GB and {seconds:.0f} s"
        steps.result.left_out.append(f"{name}: {folder} has {have}, it needs {want}")
        return
    with steps.result.attempt(name, own=True):
        trainer = on_nvme(steps.shape, steps.device)
        ids = [tokens_for(steps.shape, steps.batch, step, steps.device) for step in range(NVME_STEPS)]
        durations = [clock.wall_seconds(partial(trainer.step, each)) for each in ids]
        steps.report({name: Times(durations[1:])}, f"A step of {steps.shape.name} with its optimizer on NVMe")
        steps.result.data["bytes a second written to storage"] = rate


def written_per_second(folder: Path) -> float:
    """Bytes a second that one file takes, written and flushed."""
    block = os.urandom(2**22)
    with tempfile.TemporaryFile(dir=folder) as file:
        began = time.perf_counter()
        for _ in range(PROBE_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return PROBE_BYTES / (time.perf_counter() - began)


if __name__ == "__main__":
    options = parse(__doc__)
    measure(options.device, options.seconds - 8, options.toy).finish()
    if dist.is_initialized():
        dist.destroy_process_group()
