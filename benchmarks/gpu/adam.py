"""Fused Adam against torch's fused AdamW and the copy rate of the same run.

python -m benchmarks.gpu.adam [--device cuda] [--seconds 40] [--toy]
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.gpu.clock import Clock, Work
from benchmarks.gpu.options import parse
from benchmarks.gpu.result import Bar, Result, Times
from benchmarks.gpu.shard import Shard, has_kernel, shard_of
from benchmarks.peers.base import CLIP_NORM, adamw
from zero_ext import ops

COPY_SHARE, EQUAL_TRAFFIC, PIPELINE = 0.95, 1.0, 1.7
LOSS_SCALE = 1024.0
LARGEST_ERROR = 1e-5

# Bytes an element of what each contender has to read and write, everything once a pass.
STATE = 24  # master weights and two moments in fp32, read and written
TRAFFIC = {
    "copy": 2 * 4,
    "zero_ext, fp32 gradients": STATE + 4,
    "torch fused AdamW, fp32 gradients": STATE + 4,
    "zero_ext, bf16 in and out": STATE + 2 + 2,
    "zero_ext, bf16 in and out, bf16 moments": 8 + 8 + 2 + 2,
    "zero_ext, bf16 in and out, 8-bit moments": 8 + 4 + 2 * 2 * 4 / 256 + 2 + 2,
    "zero_ext pipeline": 2 + STATE + 2 + 2,
    "torch pipeline": (2 + 4) + (4 + 4) + 4 + (4 + 4) + STATE + 4 + (4 + 2),
}
NOTE = (
    "Traffic: every buffer once for each pass that the contender has to make; rate: traffic over time, as a"
    " share of the copy's. The pipeline makes of scaled bf16 gradients new bf16 parameters: cast, unscale,"
    " norm and clip, AdamW on fp32 masters, cast out. zero_ext: norm, then one pass. torch: _foreach_copy_,"
    " _amp_foreach_non_finite_check_and_unscale_, clip_grad_norm_, fused AdamW, _foreach_copy_."
)


class TorchPipeline:
    """What a loop does for bf16 parameters with torch's own kernels."""

    def __init__(self, shard: Shard, grad: Tensor, param: Tensor) -> None:
        self._grad, self._param = grad, param
        self._master = torch.nn.Parameter(shard.master.clone())
        self._wide = torch.zeros_like(shard.master)
        self._master.grad = self._wide
        self._inverse = torch.full((), 1 / LOSS_SCALE, device=grad.device)
        self._overflow = torch.zeros((), device=grad.device)
        self._optimizer = adamw([self._master])

    @torch.no_grad()
    def step(self) -> None:
        """Scaled gradients in, parameters out."""
        torch._foreach_copy_([self._wide], [self._grad])
        torch._amp_foreach_non_finite_check_and_unscale_([self._wide], self._overflow, self._inverse)
        torch.nn.utils.clip_grad_norm_([self._master], CLIP_NORM, foreach=True)
        self._optimizer.step()
        torch._foreach_copy_([self._param], [self._master.data])


class Pipeline:
    """The same by the exact norm and one pass."""

    def __init__(self, shard: Shard, grad: Tensor, param: Tensor) -> None:
        self._shard, self._grad, self._param = shard, grad, param
        self._sum = torch.zeros(33, dtype=torch.int64, device=grad.device)

    @torch.no_grad()
    def step(self) -> None:
        """Scaled gradients in, parameters out; nothing waits for the device."""
        self._sum.zero_()
        ops.squared_norm_(self._grad, self._sum)
        norm = ops.squared_norm_value(self._sum).sqrt() / LOSS_SCALE
        factor = (CLIP_NORM / (norm + 1e-6)).clamp(max=1.0) / LOSS_SCALE
        self._shard.scale.copy_(factor)
        self._shard.update(self._grad, self._param)


class EightBit:
    """One pass over moments of a byte an element."""

    def __init__(self, shard: Shard, grad: Tensor, param: Tensor) -> None:
        self._shard, self._grad, self._param = shard, grad, param
        count, device = grad.numel(), grad.device
        self._moments = [
            ops.Quantized(
                torch.zeros(count, dtype=torch.uint8, device=device),
                torch.zeros(ops.block_count(count), device=device),
            )
            for _ in range(2)
        ]

    def step(self) -> None:
        """bf16 gradients in, bf16 parameters out."""
        shard = self._shard
        exp_avg, exp_avg_sq = self._moments
        arguments = (self._grad, self._param, shard.segments, shard.hyper, shard.scale)
        ops.adam_step_8bit_(shard.master, exp_avg, exp_avg_sq, *arguments)


def agreement(device: torch.device, count: int = 100_003) -> float:
    """Distance from torch's fused AdamW after three steps, in norm, over the distance gone by both."""
    shard = shard_of(count, device)
    shard.master.mul_(1e-3)
    shard.exp_avg.zero_()
    shard.exp_avg_sq.zero_()
    start = shard.master.clone()
    weight = torch.nn.Parameter(start.clone())
    optimizer = adamw([weight])
    for step in range(1, 4):
        weight.grad = torch.randn(count, device=device)
        shard.hyper[0, 5] = step
        shard.update(weight.grad)
        optimizer.step()
    reached = weight.detach()
    return float((shard.master - reached).norm() / (reached - start).norm())


def contenders(count: int, device: torch.device, result: Result) -> dict[str, Work]:
    """Everyone who has kernels on this device."""
    shard = shard_of(count, device)
    wide = torch.randn(count, device=device)
    grad = (LOSS_SCALE * 1e-3 * wide).bfloat16()
    param = torch.empty(count, dtype=torch.bfloat16, device=device)
    weight = torch.nn.Parameter(shard.master.clone())
    weight.grad = wide
    fused = adamw([weight])
    other = torch.empty_like(wide)
    halves = shard_of(count, device, torch.bfloat16)
    halves.master = shard.master
    found: dict[str, Work] = {
        "copy": lambda: other.copy_(wide),
        "zero_ext, fp32 gradients": lambda: shard.update(wide),
        "torch fused AdamW, fp32 gradients": fused.step,
        "zero_ext, bf16 in and out": lambda: shard.update(grad, param),
        "zero_ext, bf16 in and out, bf16 moments": lambda: halves.update(grad, param),
        "zero_ext pipeline": Pipeline(shard, grad, param).step,
        "torch pipeline": TorchPipeline(shard, grad, param).step,
    }
    if has_kernel("adam_step_8bit_", device):
        found["zero_ext, bf16 in and out, 8-bit moments"] = EightBit(shard, grad, param).step
    else:
        result.left_out.append(f"8-bit Adam: no kernel for {device.type}")
    return found


def judge(times: dict[str, Times], count: int, result: Result) -> None:
    """The table and the bars."""
    columns = ("contender", "bytes an element", "ms (range)", "GB/s", "of the copy's rate")
    rows = result.table(f"Adam on {count:,} elements", columns, NOTE)
    copied = times["copy"].rate(TRAFFIC["copy"])
    for name, each in times.items():
        share = each.rate(TRAFFIC[name]) / copied
        gigabytes = each.rate(TRAFFIC[name] * count) / 1e9
        rows.append([name, f"{TRAFFIC[name]:.4g}", each.milliseconds(), f"{gigabytes:.1f}", f"{share:.3f}"])
        result.data[name] = {"seconds": each.seconds, "traffic": TRAFFIC[name], "share_of_copy": share}
    ours, theirs = times["zero_ext, fp32 gradients"], times["torch fused AdamW, fp32 gradients"]
    pipeline = times["zero_ext pipeline"].against(times["torch pipeline"])
    for name in ("zero_ext, fp32 gradients", "zero_ext, bf16 in and out"):
        share = times[name].rate(TRAFFIC[name]) / copied
        result.bars.append(Bar(f"{name}: share of the copy rate", share, COPY_SHARE))
    result.bars.append(
        Bar("torch fused AdamW / zero_ext, equal traffic", ours.against(theirs), EQUAL_TRAFFIC)
    )
    result.bars.append(Bar("torch pipeline / zero_ext pipeline, bf16", pipeline, PIPELINE))


def measure(device: torch.device, seconds: float, toy: bool) -> Result:
    """Everything at one size."""
    result = Result()
    count = 2**16 if toy else 2**28
    error = agreement(device)
    result.data["distance_from_torch"] = error
    result.bars.append(Bar("distance from torch fused AdamW", error, LARGEST_ERROR, most=True))
    times = Clock(device).in_turn(contenders(count, device, result), seconds, times=2)
    judge(times, count, result)
    return result


if __name__ == "__main__":
    options = parse(__doc__)
    measure(options.device, options.seconds - 8, options.toy).finish()
