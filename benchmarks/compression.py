"""Bytes a second of the ops of compressed communication, against a copy of as many bytes.

Run from the repository root: python -m benchmarks.compression [--millions 64] [--rounds 21]
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from benchmarks.harness.environment import available_bytes, describe
from benchmarks.harness.report import Table, conclude, terminal
from benchmarks.harness.statistics import ratio_of_rounds
from zero_ext import ops

BAR = 0.80  # of the copy's rate
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
FORMATS = {
    f"int{bits} {'symmetric' if symmetric else 'asymmetric'}": ops.BlockFormat(bits, symmetric)
    for bits in (8, 4)
    for symmetric in (True, False)
}


@dataclass
class Case:
    """An op, the bytes that it must read and write, and the seconds of each round, beside the copy's."""

    name: str
    run: Callable[[], None]
    moved: int
    seconds: list[float] = field(default_factory=list)
    copy_seconds: list[float] = field(default_factory=list)


@dataclass
class Buffers:
    """Memory on huge pages that all cases share: each only reads and writes, so contents do not matter."""

    values: dict[torch.dtype, Tensor]
    out: dict[torch.dtype, Tensor]
    errors: Tensor
    messages: Tensor
    messages_out: Tensor

    @classmethod
    def of(cls, count: int) -> "Buffers":
        """For `count` elements; the values are normally distributed."""
        values = {dtype: buffer(count, dtype) for dtype in DTYPES}
        values[torch.float32].normal_(generator=torch.Generator().manual_seed(1))
        values[torch.bfloat16].copy_(values[torch.float32])
        out = {dtype: buffer(count, dtype) for dtype in DTYPES}
        # The largest format, and room for the padding of as many messages as a sum has.
        largest = FORMATS["int8 asymmetric"].payload_bytes(count) + 4096
        messages = (buffer(largest, torch.uint8), buffer(largest, torch.uint8))
        return cls(values, out, buffer(count, torch.float32), *messages)


def buffer(count: int, dtype: torch.dtype) -> Tensor:
    """Zeros on huge pages."""
    return ops.host_buffer(count * dtype.itemsize).view(dtype)


def sign_cases(count: int, senders: int, memory: Buffers) -> Iterator[Case]:
    """Compression with its errors, expansion, and what the owner of a part does with `senders` messages."""
    size = ops.sign_payload_bytes(count)
    message = memory.messages[:size]
    errors = memory.errors
    for dtype, name in DTYPES.items():
        values, out = memory.values[dtype], memory.out[dtype]
        yield Case(
            f"compress_1bit_, {name}",
            partial(ops.compress_1bit_, message, errors, values, 1.0, 1),
            values.nbytes + 2 * errors.nbytes + size,
        )
        yield Case(
            f"decompress_1bit_, {name}",
            partial(ops.decompress_1bit_, out, message, 1.0, False, 1),
            out.nbytes + size,
        )
    received = memory.messages[: senders * size]
    total = memory.out[torch.float32]
    own = memory.messages_out[:size]
    yield Case(
        f"sum_1bit_, {senders} messages",
        lambda: ops.sum_1bit_(total, received, 1 / senders, False),
        received.nbytes + total.nbytes,
    )
    yield Case(
        f"reduce_1bit_, {senders} messages",
        lambda: ops.reduce_1bit_(own, errors, received, 1 / senders),
        received.nbytes + 2 * errors.nbytes + size,
    )


def block_cases(name: str, count: int, senders: int, memory: Buffers) -> Iterator[Case]:
    """Both directions, the sum of `senders` messages, and the sum that is quantized again."""
    format = FORMATS[name]
    message = memory.messages[: format.payload_bytes(count)]
    for dtype, title in DTYPES.items():
        values, out = memory.values[dtype], memory.out[dtype]
        yield Case(
            f"quantize_ {name}, {title}",
            partial(ops.quantize_, message, values, format, 1),
            values.nbytes + message.nbytes,
        )
        yield Case(
            f"dequantize_ {name}, {title}",
            partial(ops.dequantize_, out, message, format, 1),
            out.nbytes + message.nbytes,
        )
    each = count // senders
    received = memory.messages[: senders * format.payload_bytes(each)]
    total = memory.out[torch.float32][:each]
    again = memory.messages_out[: format.payload_bytes(each)]
    ops.quantize_(received, memory.values[torch.float32][: senders * each], format, senders)
    yield Case(
        f"sum_quantized_ {name}, {senders} messages",
        lambda: ops.sum_quantized_(total, received, format, 1 / senders, False),
        received.nbytes + total.nbytes,
    )
    yield Case(
        f"requantize_ {name}, {senders} messages",
        lambda: ops.requantize_(again, received, format, None, 1 / senders, 1),
        received.nbytes + again.nbytes,
    )


def measure(case: Case, memory: Buffers, rounds: int) -> None:
    """Times the op and a copy of as many bytes in turn, the other one first in every second round."""
    half = case.moved // 2
    source = memory.values[torch.float32].view(torch.uint8)[:half]
    target = memory.out[torch.float32].view(torch.uint8)[:half]
    # Of one thread the processor's seconds, which other work on the machine changes less.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    both = [(case.run, case.seconds), (lambda: target.copy_(source), case.copy_seconds)]
    for run, _ in both:
        run()
    for round_number in range(rounds):
        for run, seconds in both if round_number % 2 == 0 else reversed(both):
            start = clock()
            run()
            seconds.append(clock() - start)


def judge(cases: list[Case], rounds: int, senders: int) -> tuple[Table, list[dict[str, Any]]]:
    """The table, and the same figures for the JSON file."""
    table = Table(
        "Ops of compressed communication against a copy of as many bytes",
        ("op", "MB moved", "GB/s", "copy GB/s", "of the copy's rate", "bar", "met"),
        note=f"Medians of {rounds} rounds, op and copy in turn in each. Ratios are medians of the rounds'"
        f" ratios, with their 95% interval. {torch.get_num_threads()} threads (of one: its processor "
        f"seconds), all"
        " buffers on huge pages. Bytes are those that must be read and written. The copy is torch's copy_ of"
        f" half as many, which reads and writes as many. Sums are of {senders} messages.",
    )
    figures = []
    for case in cases:
        ratio = ratio_of_rounds(case.copy_seconds, case.seconds)
        seconds, copy_seconds = median(case.seconds), median(case.copy_seconds)
        rate, copy_rate = case.moved / seconds / 1e9, case.moved / copy_seconds / 1e9
        met = ratio.at_least(BAR)
        figures.append(
            {
                "name": case.name,
                "bytes": case.moved,
                "seconds": case.seconds,
                "copy_seconds": case.copy_seconds,
                "of_copy": ratio.median,
                "met": met,
            }
        )
        table.rows.append(
            [
                case.name,
                f"{case.moved / 1e6:.0f}",
                f"{rate:.1f}",
                f"{copy_rate:.1f}",
                ratio.text(),
                f"{BAR:.2f}",
                "yes" if met else "no",
            ]
        )
    return table, figures


def main(
    millions: Annotated[float, typer.Option(help="Elements, in units of 2^20.")] = 64,
    senders: Annotated[int, typer.Option(min=1, max=8, help="Messages of a sum.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds.")] = 21,
    threads: Annotated[int, typer.Option(min=0, help="Of ops and copies; 0: torch's own number.")] = 0,
) -> None:
    """Time each op against a copy of the same bytes; write the result."""
    console = terminal()
    count = int(millions * 2**20)
    needed = count * 36
    if available_bytes() < needed:
        raise typer.BadParameter(f"{needed / 2**30:.1f} GiB of free memory needed; ask for fewer --millions")
    torch.set_num_threads(threads or torch.get_num_threads())
    memory = Buffers.of(count)
    cases = []
    for group in (
        sign_cases(count, senders, memory),
        *(block_cases(name, count, senders, memory) for name in FORMATS),
    ):
        for case in group:
            measure(case, memory, rounds)
            cases.append(case)
    table, figures = judge(cases, rounds, senders)
    data = {
        "environment": describe(),
        "threads": torch.get_num_threads(),
        "instruction_set": ops.get_isa(),
        "results": figures,
    }
    missed = [f"{row['name']}: {row['of_copy']:.2f} of the copy's rate" for row in figures if not row["met"]]
    conclude(console, "compression", "Ops of compressed communication", [table], data, missed)


if __name__ == "__main__":
    typer.run(main)
