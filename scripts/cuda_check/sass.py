"""Reads machine code as `cuobjdump --dump-sass` prints it: instructions, loops, accesses of global memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

ARCHITECTURE = re.compile(r"^\s*code for (sm_\w+)")
FUNCTION = re.compile(r"^\s*Function : (\S+)")
INSTRUCTION = re.compile(
    r"^\s*/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(?P<name>[A-Z][\w.]*)\s*(?P<operands>[^;]*);"
)
PREDICATE = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+@")
TARGET = re.compile(r"0x([0-9a-f]+)\s*$")
WIDTH = re.compile(r"\.(U8|S8|U16|S16|64|128)\b")
ENDS = {"BPT", "EXIT", "RET"}  # BPT.TRAP ends the kernel
WIDTH_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


@dataclass(frozen=True)
class Instruction:
    address: int
    name: str  # with its modifiers, as LDG.E.128
    operands: str
    is_predicated: bool

    @property
    def opcode(self) -> str:
        return self.name.split(".")[0]

    @property
    def target(self) -> int | None:
        """The address that a branch or call goes to."""
        found = TARGET.search(self.operands)
        return int(found[1], 16) if found else None

    @property
    def is_global(self) -> bool:
        """Whether this loads from or stores to global memory. Atomic operations do not count.

        Loads of the program's own constants do not either: they are of a few bytes, which stay in the cache.
        """
        return self.opcode in {"LDG", "STG"} and not self.name.endswith(".CONSTANT")

    @property
    def width(self) -> int:
        """Bytes per thread that an access moves."""
        found = WIDTH.search(self.name)
        return WIDTH_BYTES[found[1]] if found else 4


@dataclass(frozen=True)
class Loop:
    """The instructions of a natural loop, in the order of their addresses."""

    instructions: tuple[Instruction, ...]

    @property
    def accesses(self) -> list[Instruction]:
        return [each for each in self.instructions if each.is_global]

    def bytes(self, opcode: str, least: int = 0) -> int:
        """Bytes per thread and round that accesses of at least `least` bytes move."""
        widths = [each.width for each in self.accesses if each.opcode == opcode]
        return sum(width for width in widths if width >= least)


@dataclass(frozen=True)
class Function:
    """The machine code of one kernel for one architecture."""

    name: str
    architecture: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def loops(self) -> list[Loop]:
        """All natural loops, innermost ones and those around them."""
        return _loops(self.instructions)

    @cached_property
    def main_loop(self) -> Loop | None:
        """The most deeply nested loop with accesses of 16 bytes; of several the one that moves most."""
        sets = {loop: set(loop.instructions) for loop in self.loops}

        def rank(loop: Loop) -> tuple[int, int]:
            depth = sum(sets[loop] <= other for other in sets.values())
            return depth, loop.bytes("LDG", 16) + loop.bytes("STG", 16)

        return max((loop for loop in self.loops if rank(loop)[1] > 0), key=rank, default=None)

    @cached_property
    def divisions_in_loops(self) -> int:
        """Calls of the subroutine of 64-bit division from within a loop."""
        in_loops = {each for loop in self.loops for each in loop.instructions}
        calls = [each for each in in_loops if each.opcode == "CALL" and not _branches(each)]
        return sum(self._divides(call) for call in calls)

    def _divides(self, call: Instruction) -> bool:
        for each in self.instructions:
            if call.target is None or each.address < call.target:
                continue
            if each.name.startswith(("I2F.U64", "I2F.S64")):
                return True
            if each.opcode == "RET" and not each.is_predicated:
                return False
        return False


def functions(text: str) -> Iterator[Function]:
    """The kernels of a dump, for each architecture in it."""
    architecture = ""
    name = ""
    found: list[Instruction] = []
    for line in text.splitlines():
        if (start := FUNCTION.match(line)) or ARCHITECTURE.match(line):
            if name:
                yield Function(name, architecture, tuple(found))
            name, found = "", []
            if start:
                name = start[1]
            elif code := ARCHITECTURE.match(line):
                architecture = code[1]
        elif name and (each := INSTRUCTION.match(line)):
            found.append(
                Instruction(
                    int(each["address"], 16),
                    each["name"],
                    each["operands"].strip(),
                    PREDICATE.match(line) is not None,
                )
            )
    if name:
        yield Function(name, architecture, tuple(found))


def _loops(instructions: tuple[Instruction, ...]) -> list[Loop]:
    blocks = _blocks(instructions)
    following = _edges(blocks)
    reached = _reached(following)
    following = [targets if block in reached else [] for block, targets in enumerate(following)]
    before: list[list[int]] = [[] for _ in blocks]
    for block, targets in enumerate(following):
        for target in targets:
            before[target].append(block)
    dominators = _dominators(following, before)
    bodies: dict[int, set[int]] = {}
    for block, targets in enumerate(following):
        for head in targets:
            if dominators[block] >> head & 1:
                bodies.setdefault(head, {head}).update(_body(head, block, before))
    return [Loop(tuple(each for block in sorted(body) for each in blocks[block])) for body in bodies.values()]


def _branches(instruction: Instruction) -> bool:
    # A call under a condition has no address to return to: it is how some loops are left.
    if instruction.opcode == "CALL":
        return instruction.is_predicated
    # BRA.DIV leaves only where the lanes of a warp have diverged.
    return instruction.opcode == "BRA" and not instruction.name.startswith("BRA.DIV")


def _blocks(instructions: tuple[Instruction, ...]) -> list[list[Instruction]]:
    starts = {each.target for each in instructions if _branches(each)}
    blocks: list[list[Instruction]] = []
    ended = True
    for each in instructions:
        if ended or each.address in starts:
            blocks.append([])
        blocks[-1].append(each)
        ended = _branches(each) or each.opcode in ENDS
    return blocks


def _edges(blocks: list[list[Instruction]]) -> list[list[int]]:
    by_address = {block[0].address: number for number, block in enumerate(blocks)}
    following: list[list[int]] = []
    for number, block in enumerate(blocks):
        last = block[-1]
        targets = []
        # "BRA.U !UP0, `(.L_1)`" and "BRA P0, 0x40" name their predicate among the operands.
        falls = last.is_predicated or "," in last.operands
        if _branches(last) and last.target in by_address:
            targets.append(by_address[last.target])
        ends = _branches(last) or last.opcode in ENDS
        if (not ends or falls) and number + 1 < len(blocks):
            targets.append(number + 1)
        following.append(targets)
    return following


def _reached(following: list[list[int]]) -> set[int]:
    reached = {0}
    waiting = [0]
    while waiting:
        for each in following[waiting.pop()]:
            if each not in reached:
                reached.add(each)
                waiting.append(each)
    return reached


def _dominators(following: list[list[int]], before: list[list[int]]) -> list[int]:
    """Of each block the blocks that every path to it passes, as bits; none of those that nothing reaches."""
    reached = _reached(following)
    everything = (1 << len(following)) - 1
    found = [everything if block in reached else 0 for block in range(len(following))]
    found[0] = 1
    changed = True
    while changed:
        changed = False
        for block in sorted(reached - {0}):
            common = everything
            for each in before[block]:
                common &= found[each]
            common |= 1 << block
            changed = changed or common != found[block]
            found[block] = common
    return found


def _body(head: int, tail: int, before: list[list[int]]) -> set[int]:
    body = {head, tail}
    waiting = [tail] if tail != head else []
    while waiting:
        for each in before[waiting.pop()]:
            if each not in body:
                body.add(each)
                waiting.append(each)
    return body
