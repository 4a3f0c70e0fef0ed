"""Block-sparse attention on the CPU against torch's full attention and compiled FlexAttention.

Run from the repository root: python -m benchmarks.attention [--lengths 8192,16384] [--rounds 9] [--no-flex]
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.harness import process_memory
from benchmarks.harness.environment import describe
from benchmarks.harness.report import Table, conclude, megabytes, terminal
from benchmarks.harness.statistics import ratio_of_rounds, within
from zero_ext import ops

DENSITY = 0.10  # of all blocks, or of those on and below the diagonal
SPARSE_BAR = 6.0  # times faster than full attention
FULL_BAR = 1.15  # times as long as torch's, with every block
GROWTH_BAR = 1.25  # time of a block at the greatest length over that at the least
MEMORY_BAR = 0.03
GROWN_BLOCKS = 12.8  # a row, at any length; a tenth of 128 row blocks
ERROR_BAR = 2.0  # times torch's error
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Layout:
    """Blocks of one mask, alike for all heads."""

    tensors: ops.LayoutTensors
    mask: Tensor  # bool [rows, columns] of blocks
    block: int
    causal: bool

    @property
    def blocks(self) -> int:
        return self.tensors.columns.numel()

    @property
    def density(self) -> float:
        """Part of all n^2 tokens' blocks; of n^2 / 2 if causal."""
        return self.blocks / (self.mask.numel() / 2 if self.causal else self.mask.numel())


def layout_of(mask: Tensor, block: int, causal: bool) -> Layout:
    """A layout of the blocks of a mask, without those above a causal diagonal."""
    mask = mask.tril() if causal else mask

    def by_rows(each: Tensor) -> tuple[Tensor, Tensor]:
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), each.sum(1).cumsum(0)])
        return ends.int()[None], each.nonzero()[:, 1].int()

    return Layout(ops.LayoutTensors(*by_rows(mask), *by_rows(mask.T)), mask, block, causal)


def sparse_mask(length: int, block: int, causal: bool, per_row: float) -> Tensor:
    """A window, global rows and columns and random blocks, in all at most `per_row` blocks a row."""
    rows = length // block
    window, wide = max(1, int(per_row * 0.5)), max(1, int(per_row * 0.1))
    distance = torch.arange(rows)[:, None] - torch.arange(rows)
    near = (distance >= 0) & (distance < window) if causal else distance.abs() <= (window - 1) // 2
    mask = near.clone()
    mask[:, :wide] = True
    if not causal:
        mask[:wide] = True
    allowed = torch.ones_like(mask).tril() if causal else torch.ones_like(mask)
    free = (allowed & ~mask).nonzero()
    missing = int(per_row * rows) - int((mask & allowed).sum())
    chosen = free[torch.randperm(len(free), generator=torch.Generator().manual_seed(1))[: max(missing, 0)]]
    mask[chosen[:, 0], chosen[:, 1]] = True
    return mask & allowed


def sparse_layout(length: int, block: int, causal: bool) -> Layout:
    """At most :data:`DENSITY` of the blocks."""
    per_row = DENSITY * (length // block) * (0.5 if causal else 1.0)
    return layout_of(sparse_mask(length, block, causal, per_row), block, causal)


@dataclass
class Inputs:
    """Leaves [1, heads, length, dim] and the gradient of the output."""

    rows: list[Tensor]
    grad_output: Tensor

    @classmethod
    def random(cls, heads: int, length: int, dim: int, dtype: torch.dtype, factor: float = 1.0) -> "Inputs":
        """Normal numbers; leaves are multiplied by `factor`."""
        generator = torch.Generator().manual_seed(length)
        rows = [torch.randn(1, heads, length, dim, generator=generator).to(dtype) for _ in range(4)]
        return cls([(factor * each).requires_grad_() for each in rows[:3]], rows[3])

    def sparse(self, layout: Layout) -> Tensor:
        query, key, value = self.rows
        return ops.block_sparse_attention(
            query, key, value, *layout.tensors, block=layout.block, causal=layout.causal
        )

    def torchs(self, causal: bool) -> Tensor:
        query, key, value = self.rows
        return scaled_dot_product_attention(query, key, value, is_causal=causal)

    def backward(self, output: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(output, self.rows, self.grad_output))


def in_turn(
    contenders: dict[str, Callable[[], Any]], rounds: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """Seconds of each contender, one run of each a round, starting with another one each round."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(-warm_up, rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            start = time.perf_counter()
            contenders[name]()
            if number >= 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


@dataclass
class Setting:
    """What all measurements share."""

    heads: int
    dim: int
    block: int
    rounds: int


def speed(setting: Setting, lengths: Sequence[int]) -> tuple[Table, list[dict[str, Any]]]:
    """Forward and backward against torch's full attention."""
    table = Table(
        "Forward and backward against torch's scaled_dot_product_attention",
        (
            "tokens, dtype",
            "blocks",
            "full, s",
            "sparse, s",
            "full / sparse",
            "bar",
            "met",
            "every block / full",
            "bar",
            "met",
        ),
        note=f"Medians of {setting.rounds} rounds, all in turn; ratios are medians of the rounds' ratios,"
        f" with their 95% interval. {setting.heads} heads of {setting.dim}, blocks of {setting.block},"
        f" {torch.get_num_threads()} threads.",
    )
    figures = []
    for length in lengths:
        for name, dtype in DTYPES.items():
            for causal in (False, True):
                inputs = Inputs.random(setting.heads, length, setting.dim, dtype)
                sparse = sparse_layout(length, setting.block, causal)
                every = layout_of(torch.ones_like(sparse.mask), setting.block, causal)
                runs: dict[str, Callable[[], Any]] = {
                    "full": lambda: inputs.backward(inputs.torchs(causal)),  # noqa: B023  run in this round
                    "sparse": lambda: inputs.backward(inputs.sparse(sparse)),  # noqa: B023
                    "every": lambda: inputs.backward(inputs.sparse(every)),  # noqa: B023
                }
                seconds = in_turn(runs, setting.rounds)
                faster = ratio_of_rounds(seconds["full"], seconds["sparse"])
                slower = ratio_of_rounds(seconds["every"], seconds["full"])
                kind = f"{length:,} {name}" + (", causal" if causal else "")
                table.rows.append(
                    [
                        kind,
                        f"{100 * sparse.density:.1f}%",
                        f"{median(seconds['full']):.3f}",
                        f"{median(seconds['sparse']):.3f}",
                        faster.text(),
                        f"{SPARSE_BAR}",
                        "yes" if faster.at_least(SPARSE_BAR) else "no",
                        slower.text(),
                        f"{FULL_BAR}",
                        within(slower.high, FULL_BAR),
                    ]
                )
                figures.append({"case": kind, "density": sparse.density, "seconds": seconds})
    return table, figures


def flex_forward(layout: Layout) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Compiled FlexAttention with the same mask."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key if layout.causal else query >= 0

    def blocks(mask: Tensor) -> tuple[Tensor, Tensor]:
        order = torch.argsort(mask.int(), dim=1, descending=True, stable=True)
        return mask.sum(1).int()[None, None], order.int()[None, None]

    diagonal = torch.eye(layout.mask.size(0), dtype=torch.bool) & layout.mask
    partial = diagonal if layout.causal else torch.zeros_like(layout.mask)
    mask = BlockMask.from_kv_blocks(
        *blocks(partial), *blocks(layout.mask & ~partial), BLOCK_SIZE=layout.block, mask_mod=seen
    )
    compiled = torch.compile(flex_attention, fullgraph=True)
    return lambda query, key, value: compiled(query, key, value, block_mask=mask)


def against_flex(setting: Setting, lengths: Sequence[int]) -> tuple[Table, list[dict[str, Any]]]:
    """Forward alone: FlexAttention has no backward on the CPU."""
    table = Table(
        "Forward against compiled FlexAttention, the same mask",
        (
            "tokens, dtype",
            "FlexAttention, s",
            "sparse, s",
            "FlexAttention / sparse",
            "bar",
            "met",
            "largest difference",
        ),
        note="As above. The mask is given to FlexAttention as blocks, whole ones apart from the diagonal's.",
    )
    figures = []
    for length in lengths:
        for name, dtype in DTYPES.items():
            for causal in (False, True):
                inputs = Inputs.random(setting.heads, length, setting.dim, dtype)
                rows = [each.detach() for each in inputs.rows]
                layout = sparse_layout(length, setting.block, causal)
                flex, own = flex_forward(layout), Inputs(rows, inputs.grad_output)
                difference = float((flex(*rows).float() - own.sparse(layout).float()).abs().max())
                seconds = in_turn(
                    {"flex": lambda: flex(*rows), "sparse": lambda: own.sparse(layout)},  # noqa: B023
                    setting.rounds,
                )
                ratio = ratio_of_rounds(seconds["flex"], seconds["sparse"])
                kind = f"{length:,} {name}" + (", causal" if causal else "")
                table.rows.append(
                    [
                        kind,
                        f"{median(seconds['flex']):.3f}",
                        f"{median(seconds['sparse']):.3f}",
                        ratio.text(),
                        "1.0",
                        "yes" if ratio.at_least(1.0) else "no",
                        f"{difference:.1e}",
                    ]
                )
                figures.append({"case": kind, "seconds": seconds, "difference": difference})
    return table, figures


def growth(setting: Setting, lengths: Sequence[int]) -> tuple[Table, list[dict[str, Any]]]:
    """Time of one block at growing lengths with equally many blocks a row."""
    least, most = min(lengths), max(lengths)
    table = Table(
        "Growth: forward and backward, as many blocks a row at every length",
        ("dtype", *(f"{length:,}: us a block" for length in (least, most)), "ratio", "bar", "met"),
    )
    figures = []
    for name, dtype in DTYPES.items():
        runs: dict[str, Callable[[], Any]] = {}
        blocks = {}
        for length in (least, most):
            mask = sparse_mask(length, setting.block, False, GROWN_BLOCKS)
            layout = layout_of(mask, setting.block, False)
            inputs = Inputs.random(setting.heads, length, setting.dim, dtype)
            runs[str(length)] = lambda each=inputs, layout=layout: each.backward(each.sparse(layout))  # type: ignore[misc]
            blocks[str(length)] = layout.blocks * setting.heads
        seconds = in_turn(runs, setting.rounds)
        each = {key: [1e6 * value / blocks[key] for value in values] for key, values in seconds.items()}
        ratio = ratio_of_rounds(each[str(most)], each[str(least)])
        table.rows.append(
            [
                name,
                *(f"{median(each[str(length)]):.1f}" for length in (least, most)),
                ratio.text(),
                f"{GROWTH_BAR}",
                within(ratio.high, GROWTH_BAR),
            ]
        )
        figures.append({"dtype": name, "blocks": blocks, "seconds": seconds})
    return table, figures


def formula_bytes(setting: Setting, length: int, dtype: torch.dtype) -> int:
    """Output, logsumexp, gradients; for each thread float32 sums of a head's keys and values, and tiles."""
    rows = setting.heads * length
    threads = min(torch.get_num_threads(), setting.heads)
    padded = -(-setting.dim // 16) * 16
    tiles = 11 * 64 * padded + 7 * 64 * 64 + 2 * 64
    return rows * (4 * setting.dim * dtype.itemsize + 4) + threads * (8 * length * padded + 4 * tiles)


def memory_of_one(setting: Setting, length: int, dtype: torch.dtype, causal: bool) -> tuple[int, int]:
    """Bytes by which a layout, a forward and a backward raise the high-water mark, and the layout's own."""
    mask = sparse_mask(length, setting.block, causal, GROWN_BLOCKS)
    inputs = Inputs.random(setting.heads, length, setting.dim, dtype)
    small = Inputs.random(setting.heads, 1024, setting.dim, dtype)
    small.backward(small.sparse(sparse_layout(1024, setting.block, causal)))
    process_memory.return_free_pages()
    process_memory.reset_peak()
    before = process_memory.resident_bytes()
    layout = layout_of(mask, setting.block, causal)
    process_memory.return_free_pages()  # of the mask as integers, which is no part of a layout
    held = inputs.backward(inputs.sparse(layout))
    measured = process_memory.peak_bytes() - before
    del held
    return measured, sum(each.nbytes for each in layout.tensors if each is not None)


def memory(setting: Setting, lengths: Sequence[int]) -> tuple[Table, list[dict[str, Any]]]:
    """Growth of the process's high-water mark over a forward and backward, against the formula."""
    table = Table(
        "Memory of a layout, a forward and a backward beside inputs",
        ("tokens, dtype", "formula, MB", "of which layout, MB", "measured, MB", "off by", "bar", "met"),
        note="Formula: the layout's lists by rows and columns, output and three gradients, 4 bytes of"
        " logsumexp a query; for each thread 8 bytes for every key and (padded) head dim, and its tiles."
        " Measured: VmHWM over VmRSS before.",
    )
    figures = []
    for length in lengths:
        for name, dtype in DTYPES.items():
            for causal in (False, True):
                measured, lists = memory_of_one(setting, length, dtype, causal)
                wanted = formula_bytes(setting, length, dtype) + lists
                off = measured / wanted - 1
                kind = f"{length:,} {name}" + (", causal" if causal else "")
                table.rows.append(
                    [
                        kind,
                        megabytes(wanted),
                        f"{lists / 1e6:.2f}",
                        megabytes(measured),
                        f"{100 * off:+.1f}%",
                        f"{100 * MEMORY_BAR:.0f}%",
                        within(abs(off), MEMORY_BAR),
                    ]
                )
                figures.append({"case": kind, "formula": wanted, "measured": measured, "layout": lists})
    return table, figures


@dataclass(frozen=True)
class ExactnessCase:
    """One comparison of errors; torch is given what a sparse layout lets through as a mask."""

    name: str
    causal: bool
    sparse: bool = False
    factor: float = 1.0  # of queries, keys and values

    def layout(self, length: int, block: int) -> Layout:
        if self.sparse:
            return sparse_layout(length, block, self.causal)
        every = torch.ones(length // block, length // block, dtype=torch.bool)
        return layout_of(every, block, self.causal)


EXACTNESS = (
    ExactnessCase("", causal=False),
    ExactnessCase(", causal", causal=True),
    ExactnessCase(", sparse", causal=False, sparse=True),
    ExactnessCase(", sparse, causal", causal=True, sparse=True),
    ExactnessCase(", inputs x 8", causal=False, factor=8.0),
    ExactnessCase(", inputs x 8, causal", causal=True, factor=8.0),
    ExactnessCase(", inputs x 8, sparse", causal=False, sparse=True, factor=8.0),
)


def seen_by(layout: Layout) -> Tensor:
    """Bool [tokens, tokens]."""
    seen = layout.mask.repeat_interleave(layout.block, 0).repeat_interleave(layout.block, 1)
    return seen.tril() if layout.causal else seen


def exact_results(inputs: Inputs, seen: Tensor) -> list[Tensor]:
    """Output and gradients in float64."""
    rows = [each.detach().double().requires_grad_() for each in inputs.rows]
    scores = rows[0] @ rows[1].transpose(-1, -2) / math.sqrt(rows[0].size(-1))
    output = scores.masked_fill(~seen, -math.inf).softmax(-1) @ rows[2]
    return [output.detach(), *torch.autograd.grad(output, rows, inputs.grad_output.double())]


def errors_of(inputs: Inputs, layout: Layout, sparse: bool) -> tuple[list[float], list[float]]:
    """Root mean square errors of output and gradients against float64: ours, torch's."""
    seen = seen_by(layout)
    exact = exact_results(inputs, seen)
    query, key, value = inputs.rows
    torchs = (
        scaled_dot_product_attention(query, key, value, attn_mask=seen)
        if sparse
        else inputs.torchs(layout.causal)
    )

    def errors(output: Tensor) -> list[float]:
        found = [output.detach(), *inputs.backward(output)]
        pairs = zip(found, exact, strict=True)
        return [float((each.double() - right).square().mean().sqrt()) for each, right in pairs]

    return errors(inputs.sparse(layout)), errors(torchs)


def exactness(setting: Setting, length: int = 1024) -> tuple[Table, list[dict[str, Any]]]:
    """Root mean square errors against float64, beside torch's."""
    names = ("output", "grad query", "grad key", "grad value")
    table = Table(
        f"Errors against float64 over those of scaled_dot_product_attention, {length:,} tokens",
        ("dtype", *names, "bar", "met"),
        note="Ratios of root mean square errors; below 1 is more exact than torch. Every block unless sparse;"
        " then torch has the layout as a mask.",
    )
    figures = []
    for name, dtype in {**DTYPES, "float16": torch.float16}.items():
        for case in EXACTNESS:
            inputs = Inputs.random(2, length, setting.dim, dtype, case.factor)
            ours, theirs = errors_of(inputs, case.layout(length, setting.block), case.sparse)
            ratios = [own / other for own, other in zip(ours, theirs, strict=True)]
            kind = name + case.name
            met = within(max(ratios), ERROR_BAR)
            table.rows.append([kind, *(f"{ratio:.2f}" for ratio in ratios), f"{ERROR_BAR}", met])
            figures.append({"case": kind, "errors": ours, "torch": theirs})
    return table, figures


def main(
    lengths: Annotated[str, typer.Option(help="Tokens of the comparisons.")] = "8192,16384",
    growth_lengths: Annotated[str, typer.Option(help="Tokens of growth and memory.")] = "8192,65536",
    heads: Annotated[int, typer.Option(min=1)] = 4,
    dim: Annotated[int, typer.Option(help="Head dim.")] = 64,
    block: Annotated[int, typer.Option(help="Tokens of a block.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Measured runs of each contender.")] = 9,
    flex: Annotated[
        bool, typer.Option(help="Compare with FlexAttention, which needs a C++ compiler.")
    ] = True,
) -> None:
    """Measure block-sparse attention against its peers and write the result."""
    console = terminal()
    setting = Setting(heads, dim, block, rounds)
    compared = [int(each) for each in lengths.split(",")]
    grown = [int(each) for each in growth_lengths.split(",")]
    sections: dict[str, Callable[[], tuple[Table, list[dict[str, Any]]]]] = {
        "memory": lambda: memory(setting, grown),
        "speed": lambda: speed(setting, compared),
        "growth": lambda: growth(setting, grown),
        "exactness": lambda: exactness(setting),
    }
    if flex:
        sections["flex"] = lambda: against_flex(setting, compared)
    tables = []
    data: dict[str, Any] = {"environment": describe(), "instruction_set": ops.get_isa()}
    for name, section in sections.items():
        console.print(f"measuring {name}")
        table, data[name] = section()
        tables.append(table)
    failures = [f"{table.title}: {row[0]}" for table in tables for row in table.rows if "no" in row]
    conclude(console, "attention", "Block-sparse attention on the CPU", tables, data, failures)


if __name__ == "__main__":
    typer.run(main)
