"""The kernels that stream through memory: what their main loops move, and how fast that can be on a GPU.

A streaming kernel should run at the rate of a copy. What its machine code lets expect of that is estimated:

    share = min(1, issue, latency)
    issue   = (rate of instructions / instructions per element) / (copy rate / bytes per element)
    latency = bytes in flight / (copy rate * latency of memory)

Bytes in flight are those that the warps which fit on the GPU load in one round of the main loop. The figures
of the GPU are those of an H100 SXM. The latency is a guess for busy memory. Nothing of this is measured.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from scripts.cuda_check import sass
from scripts.cuda_check.disassembler import Code

WIDE_BYTES = 16
WARP = 32
SIZES = {"float": 4, "BFloat16": 2, "Float16": 2, "NoParam": 0}
MOMENTS = {"AdamRule": 2, "LambRule": 2, "LionRule": 1}

PROCESSORS = 132
CLOCK = 1.755e9
COPY_RATE = 3.35e12  # bytes per second, read and written together
LATENCY = 800e-9
WARP_INSTRUCTIONS_PER_CLOCK = 4  # of a processor


@dataclass(frozen=True)
class Limits:
    """What a processor of an architecture holds at once."""

    warps: int = 64
    blocks: int = 32
    registers: int = 65536
    shared_bytes: int = 164 << 10


LIMITS = {"sm_80": Limits(), "sm_90": Limits(shared_bytes=228 << 10)}
REGISTERS_PER_UNIT = 256  # that a warp is given together
SHARED_BYTES_OF_SYSTEM = 1 << 10  # of each block


def occupancy(architecture: str, threads: int, registers: int, shared_bytes: int) -> float:
    """The share of a processor's warps that run at once, of blocks with that many threads."""
    limits = LIMITS[architecture]
    warps = -(-threads // WARP)
    of_warp = -(-registers * WARP // REGISTERS_PER_UNIT) * REGISTERS_PER_UNIT
    by_registers = limits.registers // of_warp // warps
    by_shared = limits.shared_bytes // (shared_bytes + SHARED_BYTES_OF_SYSTEM)
    return min(limits.blocks, limits.warps // warps, by_registers, by_shared) * warps / limits.warps


def _step(rule: str, moment: str, grad: str, param: str) -> float:
    return 8 + 2 * MOMENTS[rule] * SIZES[moment] + SIZES[grad] + SIZES[param]


def _move(flat: str, element: str, move: str) -> float:
    return SIZES[flat] * (2 if move == "AccumulateElement" else 1) + SIZES[element]


def _bits(code: str) -> int:
    """Bits of an integer code or of the payloads of a sum."""
    return int(family(code)[1][0])


def _quantize(source: str, code: str) -> float:
    """Values to words; or the words of a payload, of which a sum has a loop of its own."""
    template, (values, *_) = family(source)
    return SIZES[values] + _bits(code) / 8 if template == "IntegerValues" else _bits(source) / 8


def _is_one(payloads: str) -> bool:
    return family(payloads)[1][1] == "true"


def _write(source: str, out: str) -> float:
    return _bits(source) / 8 + (2 * SIZES[out] if _is_one(source) else 0)


def _compress(terms: str) -> float | None:
    return 1 / 8 if terms == "SignSum" else None


# Bytes per element that the main loop of a kernel moves, by its template and the arguments of that; None of a
# kernel without one. Scales that all lanes of a warp read are no bytes of an element's.
FAMILIES: dict[str, Callable[..., float | None]] = {
    "OptimizerStep": _step,
    "AdamBlocks": lambda grad, param: 8 + 4 + SIZES[grad] + SIZES[param],
    "AddLambSquares": lambda moment, grad: 4 + 2 * SIZES[moment] + SIZES[grad],
    "MoveSegments": _move,
    "SumShards": lambda target, source: SIZES[source],
    "FlagNonFinite": lambda values: SIZES[values],
    "AddSquares": lambda values: SIZES[values],
    "QuantizeBlocks": lambda code: 4 + 1,
    "DequantizeBlocks": lambda code: 4 + 1,
    "QuantizeIntegers": _quantize,
    "WriteIntegers": _write,
    "Compress1bit": _compress,
    "Decompress1bit": lambda out: 2 * SIZES[out],
    "Sum1bit": lambda: 1 / 8,
    "PrepareGradients": lambda values: 2 * SIZES[values],
}

# Elements of a thread in one pass of the kernels that move something outside their main loop.
PASS = 32


def _compress_pass(terms: str) -> tuple[float, float]:
    values = 0 if terms == "SignSum" else SIZES[family(terms)[1][0]]
    return PASS * (values + 4), PASS * 4 + WIDE_BYTES


def _quantize_pass(source: str, code: str) -> tuple[float, float]:
    return 0, PASS * _bits(code) / 8 + WIDE_BYTES if family(source)[0] == "IntegerSum" else 0


def _write_pass(source: str, out: str) -> tuple[float, float]:
    moved = 0 if _is_one(source) else PASS * SIZES[out]
    return moved, moved


# Bytes that a thread loads and stores outside the main loop, in accesses of 16 bytes where buffers allow it.
# There may be narrower ones besides: scales, and what a block does where they do not.
PASSES: dict[str, Callable[..., tuple[float, float]]] = {
    "QuantizeIntegers": _quantize_pass,
    "WriteIntegers": _write_pass,
    "Compress1bit": _compress_pass,
    "Sum1bit": lambda: (PASS * 4, PASS * 4),
    "PrepareGradients": lambda values: (WIDE_BYTES, 2 * WIDE_BYTES),
}


@dataclass(frozen=True)
class Stream:
    """The main loop of a streaming kernel on one architecture, or the whole of one that has no loop."""

    bytes_per_element: float
    instructions_per_element: float
    widths: tuple[int, ...]  # of its accesses of global memory, in bytes per thread
    loaded_bytes: int  # per thread and round
    elements: float  # per thread and round
    lacking_bytes: float = 0  # that accesses of 16 bytes should move outside the main loop
    divisions: int = 0  # of 64 bits, in loops

    @property
    def narrow(self) -> int:
        """Accesses of fewer than 16 bytes."""
        return sum(width < WIDE_BYTES for width in self.widths)

    def share_of_copy_rate(self, occupied: float, architecture: str = "sm_90") -> float:
        """The estimate of the module's text, for an occupancy from 0 to 1."""
        rate = PROCESSORS * CLOCK * WARP_INSTRUCTIONS_PER_CLOCK * WARP
        issue = rate / self.instructions_per_element / (COPY_RATE / self.bytes_per_element)
        threads = PROCESSORS * occupied * LIMITS[architecture].warps * WARP
        latency = threads * self.loaded_bytes / (COPY_RATE * LATENCY)
        return min(1.0, issue, latency)


def family(name: str) -> tuple[str, list[str]]:
    """A kernel's template and the arguments of that."""
    found = re.fullmatch(r"(\w+)<(.*)>", name)
    if found is None:
        return name, []
    arguments = [""]
    depth = 0
    for each in found[2]:
        depth += (each == "<") - (each == ">")
        if each == "," and depth == 0:
            arguments.append("")
        else:
            arguments[-1] += each
    return found[1], [each.strip() for each in arguments]


def stream(name: str, code: Code) -> Stream | None:
    """How a streaming kernel moves its elements; None of another kernel.

    Raises:
        RuntimeError: no loop of a streaming kernel has an access of 16 bytes.
    """
    template, arguments = family(name)
    if template not in FAMILIES:
        return None
    per_element = FAMILIES[template](*arguments)
    if per_element is None:
        return _full_body(code.function, *PASSES[template](*arguments))
    loop = code.function.main_loop
    if loop is None:
        raise RuntimeError(
            f"{name}: expected a main loop with accesses of 16 bytes, got none in its machine code."
        )
    loaded = loop.bytes("LDG")
    elements = (loaded + loop.bytes("STG")) / per_element
    besides = PASSES[template](*arguments) if template in PASSES else (0, 0)
    return Stream(
        per_element,
        len(loop.instructions) / elements,
        tuple(sorted(each.width for each in loop.accesses)),
        loaded,
        elements,
        _lacking(set(code.function.instructions) - set(loop.instructions), *besides),
        code.function.divisions_in_loops,
    )


def _full_body(function: sass.Function, loaded: float, stored: float) -> Stream:
    """A kernel that has no main loop: what it does once. Its loops are for what is not aligned."""
    once = set(function.instructions).difference(*(each.instructions for each in function.loops))
    return Stream(
        (loaded + stored) / PASS,
        len(once) / PASS,
        tuple(each.width for each in once if each.is_global and each.width >= WIDE_BYTES),
        int(loaded),
        PASS,
        _lacking(once, loaded, stored),
        function.divisions_in_loops,
    )


def _lacking(instructions: Iterable[sass.Instruction], loaded: float, stored: float) -> float:
    found = sass.Loop(tuple(instructions))
    loads, stores = found.bytes("LDG", WIDE_BYTES), found.bytes("STG", WIDE_BYTES)
    return max(0, loaded - loads) + max(0, stored - stores)
