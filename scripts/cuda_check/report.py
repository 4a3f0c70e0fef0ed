"""The tables that the check writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scripts.cuda_check import streams
from scripts.cuda_check.compiler import Kernel
from scripts.cuda_check.disassembler import Code

SHARED_BYTES = 48 << 10  # that every GPU gives a block without being asked

HEAD = """# CUDA kernels

Registers, memory and estimated copy rates of every kernel of module `_C_cuda`, from the output of nvcc's
assembler and the machine code. `python -m scripts.cuda_check --report docs/contributing/cuda_kernels.md`
writes this page. Nothing on it was measured on a GPU.

{compiler}; {architectures}, and PTX for later GPUs. {count} kernels, {spilling} with spilled registers,
{narrow} streaming kernels with an access of fewer than 16 bytes where buffers are aligned, {divisions}
kernels with a 64-bit division in a loop.

The column *stack* is in bytes per thread. The column *shared* is in bytes per block, without the memory that
attention allocates at launch (`csrc/cuda/attention/attention_tiling.h`: at most 99 KiB). The other columns
are for {described}:

- *occupancy*: fraction of a multiprocessor's warps that run simultaneously, from registers, static shared
  memory and the threads per block. Attention's shared memory lowers its occupancy further.
- *bytes* and *instructions*: per element in the main loop of a streaming kernel. The main loop is the most
  deeply nested loop with accesses of 16 bytes, and among several such loops the one that transfers the most
  bytes in these accesses. All its branches count, including branches that exclude each other. A kernel that
  sums payloads has the elements of one payload in its main loop and writes the sum after it. A kernel
  without a loop is counted in full, except for the code for unaligned buffers.
- *widths*: bytes per thread of each access to global memory in the main loop.
- *copy rate*: **estimated** fraction of the copy rate of an H100, min(1, issue, latency). *issue* is
  (instruction rate / instructions per element) / (copy rate / bytes per element). *latency* is bytes in
  flight / (copy rate * memory latency). Each resident warp has the loads of one iteration in flight. The
  estimate assumes {processors} multiprocessors at {clock:.3f} GHz, {rate:.2f} TB/s and {latency:.0f} ns.
"""


@dataclass(frozen=True)
class Checked:
    """A kernel on one architecture: from the assembler, and from its machine code where that was read."""

    kernel: Kernel
    code: Code | None
    stream: streams.Stream | None

    @property
    def occupancy(self) -> float | None:
        if self.code is None:
            return None
        own = self.kernel
        return streams.occupancy(own.architecture, self.code.threads, own.registers, own.shared_bytes)

    @property
    def faults(self) -> list[str]:
        """What fails the check."""
        found = []
        if self.kernel.spilled_bytes > 0:
            found.append(f"expected no spilled registers, got {self.kernel.spilled_bytes} bytes")
        if self.kernel.shared_bytes > SHARED_BYTES:
            found.append(
                f"expected at most {SHARED_BYTES} bytes of shared memory, got {self.kernel.shared_bytes}"
            )
        if self.stream is not None and self.stream.narrow > 0:
            found.append(f"expected accesses of 16 bytes in the main loop, got {widths(self.stream)}")
        if self.stream is not None and self.stream.lacking_bytes > 0:
            found.append(
                "expected all bytes outside the main loop in accesses of 16, "
                f"got {self.stream.lacking_bytes:g} too few of a thread's"
            )
        if self.stream is not None and self.stream.divisions > 0:
            found.append(f"expected no 64-bit division in a loop, got {self.stream.divisions}")
        return [f"{self.kernel.architecture} {self.kernel.name}: {each}." for each in found]


def lines(checked: Sequence[Checked]) -> str:
    """One line for each kernel on each architecture."""
    return "\n".join(sorted(_line(each) for each in checked)) + "\n"


def _line(each: Checked) -> str:
    kernel = each.kernel
    text = (
        f"{kernel.architecture} {kernel.registers:4} registers {kernel.spilled_bytes:6} bytes spilled "
        f"{kernel.stack_bytes:6} stack {kernel.shared_bytes:6} shared"
    )
    if each.code is not None and each.occupancy is not None:
        text += f" {each.occupancy:4.0%} occupancy {each.code.function.divisions_in_loops} divisions in loops"
    if each.stream is not None and each.occupancy is not None:
        text += (
            f" {each.stream.bytes_per_element:5g} bytes {each.stream.instructions_per_element:6.1f} "
            f"instructions per element, accesses of {widths(each.stream)} bytes, copy rate estimated "
            f"{each.stream.share_of_copy_rate(each.occupancy):4.0%}"
        )
    return f"{text}  {kernel.name}"


def widths(stream: streams.Stream) -> str:
    """Bytes of each access and how many there are, as `8 x 16`."""
    return ", ".join(f"{stream.widths.count(each)} x {each}" for each in sorted(set(stream.widths)))


def table(checked: Sequence[Checked], compiler: str) -> str:
    """The report as Markdown: a row for each kernel, registers for each architecture."""
    architectures = sorted({each.kernel.architecture for each in checked})
    by_kernel: dict[tuple[str, str], dict[str, Checked]] = {}
    for each in checked:
        by_kernel.setdefault((each.kernel.file, each.kernel.name), {})[each.kernel.architecture] = each
    text = HEAD.format(
        compiler=compiler,
        architectures=", ".join(architectures),
        count=len(by_kernel),
        spilling=_count(each for each in checked if each.kernel.spilled_bytes > 0),
        narrow=_count(
            each
            for each in checked
            if each.stream is not None and (each.stream.narrow > 0 or each.stream.lacking_bytes > 0)
        ),
        divisions=_count(
            each for each in checked if each.code is not None and each.code.function.divisions_in_loops > 0
        ),
        described=architectures[-1],
        processors=streams.PROCESSORS,
        clock=streams.CLOCK / 1e9,
        rate=streams.COPY_RATE / 1e12,
        latency=streams.LATENCY * 1e9,
    )
    columns = ["spilled", "stack", "shared", "occupancy", "bytes", "instructions", "widths", "copy rate"]
    rows = [text]
    for file in sorted({file for file, _ in by_kernel}):
        rows += [f"\n## {file}\n", f"| kernel | registers {' | '.join([*architectures, *columns])} |"]
        rows.append("| --- | " + " | ".join(["---:"] * (len(architectures) + len(columns))) + " |")
        for (of_file, name), found in sorted(by_kernel.items()):
            if of_file == file:
                rows.append(f"| `{name}` | {' | '.join(_cells(found, architectures))} |")
    return "\n".join(rows).replace("\n\n\n", "\n\n") + "\n"


def _count(checked: Iterable[Checked]) -> int:
    """How many kernels these are, each on one or several architectures."""
    return len({(each.kernel.file, each.kernel.name) for each in checked})


def _cells(found: dict[str, Checked], architectures: Sequence[str]) -> list[str]:
    registers = [str(found[each].kernel.registers) if each in found else "" for each in architectures]
    most = [
        str(max(getattr(each.kernel, field) for each in found.values()))
        for field in ("spilled_bytes", "stack_bytes", "shared_bytes")
    ]
    last = found[max(found)]
    code = [""] * 5
    if last.occupancy is not None:
        code[0] = f"{last.occupancy:.0%}"
        if last.stream is not None:
            code[1:] = [
                f"{last.stream.bytes_per_element:g}",
                f"{last.stream.instructions_per_element:.1f}",
                widths(last.stream),
                f"{last.stream.share_of_copy_rate(last.occupancy):.0%}",
            ]
    return [*registers, *most, *code]
