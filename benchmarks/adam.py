"""One optimizer step of AdamW on one flat shard: one pass against the peers' pipelines and a bare stream.

Run from the repository root: python -m benchmarks.adam [--millions 64] [--rounds 21]
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from benchmarks.harness.environment import available_bytes, describe
from benchmarks.harness.report import Table, conclude, terminal
from benchmarks.harness.statistics import ratio_of_rounds
from zero_ext import ops
from zero_ext.config.buffer_sizes import block_count
from zero_ext.ops.compression import Quantized

LR, BETAS, EPS, WEIGHT_DECAY, SCALE = 1e-4, (0.9, 0.999), 1e-8, 0.01, 0.25
STREAM_BAR = 0.90  # of the stream's speed
PIPELINE_BAR = 1.70  # times faster than the peers' pipelines
AGREEMENT = 1e-5
EIGHT_BIT_AGREEMENT = 0.1  # of the distance that float32 moments move the masters


def buffer(count: int, dtype: torch.dtype) -> Tensor:
    """Zeros on huge pages, the same kind of memory for every contender."""
    return ops.host_buffer(count * dtype.itemsize).view(dtype)


def gradient(count: int) -> Tensor:
    """The bfloat16 gradient that every contender reads."""
    values = buffer(count, torch.bfloat16)
    return values.normal_(generator=torch.Generator().manual_seed(1))


def weights(count: int) -> Tensor:
    """Float32 masters, equal for every contender."""
    return buffer(count, torch.float32).normal_(generator=torch.Generator().manual_seed(2))


@dataclass
class Contender:
    """Something timed: `step` does one optimizer step, `moved` is the bytes it must read and write. One with
    `eight_bit` moments is compared with others of the kind."""

    name: str
    step: Callable[[], None]
    moved: int
    master: Tensor | None = None
    eight_bit: bool = False
    seconds: list[float] = field(default_factory=list)


def stream(count: int) -> Contender:
    """Reads and writes as many bytes as the one pass, in place, in one run: the speed of the memory."""
    values = buffer(count * 14 // 4, torch.float32)

    def step() -> None:
        values.add_(1.0)

    return Contender("read-modify-write stream", step, 2 * values.nbytes)


def one_pass(count: int, grad: Tensor, moments: torch.dtype) -> Contender:
    """zero_ext's op: gradients as they are, scaled, parameters out in bfloat16, every byte once."""
    master, param = weights(count), buffer(count, torch.bfloat16)
    exp_avg, exp_avg_sq = buffer(count, moments), buffer(count, moments)
    segments, scale = torch.tensor([[0, count]]), torch.tensor(SCALE)
    hyper = torch.tensor([[LR, *BETAS, EPS, WEIGHT_DECAY, 0, 1, 0]], dtype=torch.float64)

    def step() -> None:
        hyper[0, 5] += 1
        ops.adam_step_(master, exp_avg, exp_avg_sq, grad, param, segments, hyper, scale)

    name = "zero_ext" if moments == torch.float32 else "zero_ext, bfloat16 moments"
    return Contender(name, step, count * (2 + 8 + 4 * moments.itemsize + 2), master)


def one_pass_8bit(count: int, grad: Tensor) -> Contender:
    """The same with moments of a byte per element and a float32 scale per block."""
    master, param = weights(count), buffer(count, torch.bfloat16)
    scales = block_count(count)
    exp_avg, exp_avg_sq = (
        Quantized(buffer(count, torch.uint8), buffer(scales, torch.float32)) for _ in range(2)
    )
    segments, scale = torch.tensor([[0, count]]), torch.tensor(SCALE)
    hyper = torch.tensor([[LR, *BETAS, EPS, WEIGHT_DECAY, 0, 1, 0]], dtype=torch.float64)

    def step() -> None:
        hyper[0, 5] += 1
        ops.adam_step_8bit_(master, exp_avg, exp_avg_sq, grad, param, segments, hyper, scale)

    return Contender(
        "zero_ext, 8-bit moments", step, count * (2 + 8 + 2) + 4 * (count + 4 * scales), master, True
    )


def pipeline(
    name: str,
    count: int,
    grad: Tensor,
    make: Callable[[Tensor], torch.optim.Optimizer],
    moments_moved: int,
    eight_bit: bool = False,
) -> Contender:
    """What peers do with bfloat16 gradients: widen, scale, step in float32, round the parameters back.

    A step reads and writes `moments_moved` bytes of moments."""
    master, param = weights(count), buffer(count, torch.bfloat16)
    wide = buffer(count, torch.float32)
    weight = torch.nn.Parameter(master)
    weight.grad = wide
    optimizer = make(weight)

    @torch.no_grad()
    def step() -> None:
        wide.copy_(grad)
        wide.mul_(SCALE)
        optimizer.step()
        param.copy_(weight)

    return Contender(name, step, count * (6 + 8 + 12 + 6) + moments_moved, master, eight_bit)


def bitsandbytes_adamw(weight: Tensor) -> torch.optim.Optimizer:
    """bitsandbytes' AdamW8bit."""
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit([weight], lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)


def torch_fused(weight: Tensor) -> torch.optim.Optimizer:
    """torch's fused AdamW with a state of its own."""
    optimizer = torch.optim.AdamW(
        [weight], fused=True, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY
    )
    optimizer.state[weight].update(moments_of(weight), step=torch.tensor(0.0))
    return optimizer


def deepspeed_cpu_adam(weight: Tensor) -> torch.optim.Optimizer:
    """DeepSpeed's CPU Adam in AdamW mode; compiles its kernel the first time (minutes)."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    optimizer = DeepSpeedCPUAdam([weight], lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
    optimizer.state[weight].update(moments_of(weight), step=0)
    return optimizer


def moments_of(weight: Tensor) -> dict[str, Tensor]:
    """Both moments in float32, zero, in memory like that of the other contenders."""
    return {name: buffer(weight.numel(), torch.float32) for name in ("exp_avg", "exp_avg_sq")}


def contenders(count: int, with_deepspeed: bool, with_bitsandbytes: bool) -> list[Contender]:
    """Everything that is timed, each with memory of its own."""
    grad, wide = gradient(count), 16 * count
    found = [
        stream(count),
        one_pass(count, grad, torch.float32),
        one_pass(count, grad, torch.bfloat16),
        one_pass_8bit(count, grad),
        pipeline("torch, fused AdamW", count, grad, torch_fused, wide),
    ]
    if with_deepspeed:
        found.append(pipeline("DeepSpeed, DeepSpeedCPUAdam", count, grad, deepspeed_cpu_adam, wide))
    if with_bitsandbytes:
        narrow = 4 * (count + 4 * block_count(count))
        found.append(pipeline("bitsandbytes, AdamW8bit", count, grad, bitsandbytes_adamw, narrow, True))
    return found


def run_in_turn(all_of_them: list[Contender], rounds: int) -> None:
    """Times one step of each contender a round, starting with another one each round."""
    for contender in all_of_them:
        for _ in range(2):
            contender.step()
    for round_number in range(rounds):
        first = round_number % len(all_of_them)
        for contender in all_of_them[first:] + all_of_them[:first]:
            start = time.perf_counter()
            contender.step()
            contender.seconds.append(time.perf_counter() - start)


def check_agreement(all_of_them: list[Contender]) -> float:
    """Largest relative distance of the float32 contenders' masters; RuntimeError when one strays."""
    exact = [
        each
        for each in all_of_them
        if each.master is not None and not each.eight_bit and "bfloat16 moments" not in each.name
    ]
    reference = exact[0].master
    if reference is None:
        raise RuntimeError("no contender holds master weights")
    worst = 0.0
    for other in exact[1:]:
        if other.master is not None:
            worst = max(worst, float((other.master - reference).norm() / reference.norm()))
    if not worst <= AGREEMENT:
        raise RuntimeError(f"contenders disagree by {worst:.1e} (allowed {AGREEMENT:.0e}): not the same work")
    check_8bit_agreement(all_of_them, reference)
    return worst


def check_8bit_agreement(all_of_them: list[Contender], reference: Tensor) -> None:
    """RuntimeError if 8-bit moments move the masters elsewhere than to `reference`, of float32 moments."""
    moved = (reference - weights(reference.numel())).norm()
    for each in all_of_them:
        if each.eight_bit and each.master is not None:
            apart = float((each.master - reference).norm() / moved)
            if not apart <= EIGHT_BIT_AGREEMENT:
                raise RuntimeError(
                    f"{each.name}: expected updates within {EIGHT_BIT_AGREEMENT:g} of float32 moments', got"
                    f" {apart:.2g}. It does other work than the contenders it is compared with."
                )


def judge(all_of_them: list[Contender], rounds: int) -> tuple[Table, list[dict[str, Any]]]:
    """The table, and the same figures for the JSON file."""
    base, subject = all_of_them[0], all_of_them[1]
    eight_bit = next(each for each in all_of_them if each.eight_bit)
    table = Table(
        f"AdamW step of {base.moved // 28:,} parameters, bfloat16 gradients in and parameters out",
        ("contender", "ms", "GB/s", "speed of stream", "zero_ext is faster by", "bar", "met"),
        note=f"Medians of {rounds} rounds, all contenders in turn in each. Ratios are medians of the rounds'"
        f" ratios, with their 95% interval. {torch.get_num_threads()} threads, all buffers on huge pages. "
        f"GB/s: bytes that the recipe"
        " must read and write. The stream reads and writes, in place, as many bytes as zero_ext's one pass."
        " bitsandbytes is compared with zero_ext's 8-bit moments, the others with its float32 ones.",
    )
    figures = []
    for each in all_of_them:
        against_stream = ratio_of_rounds(base.seconds, each.seconds)
        faster = ratio_of_rounds(each.seconds, (eight_bit if each.eight_bit else subject).seconds)
        bar, met = None, None
        if each is subject:
            bar, met = STREAM_BAR, against_stream.at_least(STREAM_BAR)
        elif each.name.startswith(("torch", "DeepSpeed")):
            bar, met = PIPELINE_BAR, faster.at_least(PIPELINE_BAR)
        seconds = median(each.seconds)
        row = {
            "name": each.name,
            "seconds": seconds,
            "bytes": each.moved,
            "speed_of_stream": against_stream.median,
            "zero_ext_faster_by": faster.median,
            "bar": bar,
            "met": met,
            "rounds": each.seconds,
        }
        figures.append(row)
        table.rows.append(
            [
                each.name,
                f"{seconds * 1e3:.1f}",
                f"{each.moved / seconds / 1e9:.1f}",
                against_stream.text(),
                faster.text(unit="x"),
                "" if bar is None else f"{bar:.2f}",
                "" if met is None else ("yes" if met else "no"),
            ]
        )
    return table, figures


def main(
    millions: Annotated[float, typer.Option(help="Parameters, in units of 2^20.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Measured steps of each contender.")] = 21,
    deepspeed: Annotated[bool, typer.Option(help="Measure DeepSpeed too; it must be installed.")] = True,
    bitsandbytes: Annotated[bool, typer.Option(help="Measure bitsandbytes too, likewise.")] = True,
) -> None:
    """Time the one-pass step against a stream of the same bytes and the peers; write the result."""
    console = terminal()
    count = int(millions * 2**20)
    needed = count * 150
    if available_bytes() < needed:
        raise typer.BadParameter(f"{needed / 2**30:.1f} GiB of free memory needed; ask for fewer --millions")
    all_of_them = contenders(count, deepspeed, bitsandbytes)
    run_in_turn(all_of_them, rounds)
    disagreement = check_agreement(all_of_them)
    table, figures = judge(all_of_them, rounds)
    data = {
        "environment": describe(),
        "threads": torch.get_num_threads(),
        "instruction_set": ops.get_isa(),
        "largest_disagreement": disagreement,
        "results": figures,
    }
    missed = [f"{row['name']}: a bar is missed" for row in figures if row["met"] is False]
    conclude(console, "adam", "One-pass Adam", [table], data, missed)


if __name__ == "__main__":
    typer.run(main)
