"""One optimizer step of LAMB on layers in one flat shard: two passes against torch's foreach operations.

Run from the repository root: python -m benchmarks.lamb [--millions 32] [--layers 48] [--rounds 15]
"""

from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from benchmarks.adam import AGREEMENT, Contender, buffer, gradient, run_in_turn, stream, weights
from benchmarks.harness.environment import available_bytes, describe
from benchmarks.harness.report import Table, conclude, terminal
from benchmarks.harness.statistics import ratio_of_rounds
from zero_ext import ops
from zero_ext.optim.fused_optimizers import lamb_row, trust_ratio

SETTINGS: dict[str, Any] = {
    "lr": 1e-3,
    "bias_correction": True,
    "betas": (0.9, 0.999),
    "eps": 1e-6,
    "eps_inside_sqrt": False,
    "weight_decay": 0.01,
    "max_coeff": 10.0,
    "min_coeff": 0.01,
    "maximize": False,
}
SCALE = 0.25
PIPELINE_BAR = 1.70  # times faster than torch's operations


def bounds_of(count: int, layers: int) -> list[tuple[int, int]]:
    """The first and last element of each layer: as many as equal parts of the shard."""
    size = count // layers
    return [(number * size, (number + 1) * size) for number in range(layers)]


def two_passes(count: int, layers: int, grad: Tensor) -> Contender:
    """zero_ext's ops: gradients as they are, exact norms of every layer, parameters out in bfloat16."""
    master, param = weights(count), buffer(count, torch.bfloat16)
    exp_avg, exp_avg_sq = buffer(count, torch.float32), buffer(count, torch.float32)
    segments, scale = torch.tensor(bounds_of(count, layers)), torch.tensor(SCALE)
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        hyper = torch.tensor([lamb_row(SETTINGS, steps, 1.0)] * layers, dtype=torch.float64)
        norms = torch.zeros(layers, 2, ops.ACCUMULATOR_ENTRIES, dtype=torch.int64)
        ops.lamb_norms_(master, exp_avg, exp_avg_sq, grad, segments, hyper, scale, norms)
        hyper[:, -1] = torch.tensor([trust_ratio(SETTINGS, each) for each in norms])
        ops.lamb_step_(master, exp_avg, exp_avg_sq, grad, param, segments, hyper, scale)

    return Contender("zero_ext", step, count * (14 + 14 + 12 + 2), master)


def foreach(count: int, layers: int, grad: Tensor) -> Contender:
    """torch's foreach operations over the layers: widen, scale, update, round the parameters back."""
    master, param, wide = weights(count), buffer(count, torch.bfloat16), buffer(count, torch.float32)
    spans = bounds_of(count, layers)
    weight, gradients, first, second = (
        [each[begin:end] for begin, end in spans]
        for each in (master, wide, buffer(count, torch.float32), buffer(count, torch.float32))
    )
    beta1, beta2 = SETTINGS["betas"]
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        wide.copy_(grad).mul_(SCALE)
        torch._foreach_lerp_(first, gradients, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
        roots = torch._foreach_sqrt(second)
        torch._foreach_div_(roots, (1 - beta2**steps) ** 0.5)
        torch._foreach_add_(roots, SETTINGS["eps"])
        updates = torch._foreach_div(first, 1 - beta1**steps)
        torch._foreach_div_(updates, roots)
        torch._foreach_add_(updates, weight, alpha=SETTINGS["weight_decay"])
        of_weights, of_updates = (
            torch.stack(torch._foreach_norm(weight)),
            torch.stack(torch._foreach_norm(updates)),
        )
        ratios = (of_weights / of_updates).clamp(SETTINGS["min_coeff"], SETTINGS["max_coeff"])
        torch._foreach_mul_(updates, (-SETTINGS["lr"] * ratios).tolist())
        torch._foreach_add_(weight, updates)
        param.copy_(master)

    # Read and written by the operations above, in their order.
    moved = count * (6 + 8 + 12 + 8 + 16 + 8 + 8 + 8 + 8 + 12 + 12 + 8 + 8 + 12 + 6)
    return Contender("torch, foreach", step, moved, master)


def main(
    millions: Annotated[float, typer.Option(help="Parameters, in units of 2^20.")] = 32,
    layers: Annotated[int, typer.Option(min=1, help="Layers of equal size.")] = 48,
    rounds: Annotated[int, typer.Option(min=1, help="Measured steps of each contender.")] = 15,
) -> None:
    """Time LAMB in two passes against torch's operations and a stream of memory; write the result."""
    console = terminal()
    count = int(millions * 2**20) // layers * layers
    needed = count * 64
    if available_bytes() < needed:
        raise typer.BadParameter(f"{needed / 2**30:.1f} GiB of free memory needed; ask for fewer --millions")
    grad = gradient(count)
    own, peer = two_passes(count, layers, grad), foreach(count, layers, grad)
    all_of_them = [stream(count), own, peer]
    run_in_turn(all_of_them, rounds)
    if own.master is None or peer.master is None:
        raise RuntimeError("no contender holds master weights")
    apart = float((own.master - peer.master).norm() / peer.master.norm())
    if not apart <= AGREEMENT:
        raise RuntimeError(f"contenders disagree by {apart:.1e} (allowed {AGREEMENT:.0e}): not the same work")
    table = Table(
        f"LAMB step of {count:,} parameters in {layers} layers, bfloat16 gradients in and parameters out",
        ("contender", "ms", "GB/s", "zero_ext is faster by"),
        note=f"Medians of {rounds} rounds, all contenders in turn in each. Ratios are medians of the rounds'"
        f" ratios, with their 95% interval. {torch.get_num_threads()} threads, all buffers on huge pages. "
        f"GB/s: bytes that the recipe"
        " must read and write, of zero_ext once for the norms and once for the step.",
    )
    figures = []
    for each in all_of_them:
        seconds, faster = sorted(each.seconds)[rounds // 2], ratio_of_rounds(each.seconds, own.seconds)
        table.rows.append(
            [each.name, f"{seconds * 1e3:.1f}", f"{each.moved / seconds / 1e9:.1f}", faster.text(unit="x")]
        )
        figures.append({"name": each.name, "seconds": seconds, "bytes": each.moved, "rounds": each.seconds})
    gain = ratio_of_rounds(peer.seconds, own.seconds)
    data = {
        "environment": describe(),
        "largest_disagreement": apart,
        "faster_by": gain.median,
        "results": figures,
    }
    missed = (
        [] if gain.at_least(PIPELINE_BAR) else [f"{gain.text()} times faster than torch, bar {PIPELINE_BAR}"]
    )
    conclude(console, "lamb", "LAMB in two passes", [table], data, missed)


if __name__ == "__main__":
    typer.run(main)
