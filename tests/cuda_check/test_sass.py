"""Loops and accesses in recorded machine code."""

from __future__ import annotations

from scripts.cuda_check import sass


def test_the_main_loop_is_the_innermost_one_with_wide_accesses(dump: str) -> None:
    text = dump.format(architecture="sm_80", called="0xe0", width=".128")
    (found,) = sass.functions(text + "\n")
    assert (found.name, found.architecture, len(found.instructions)) == ("kernel", "sm_80", 18)
    assert found.main_loop is not None
    assert [each.address for each in found.main_loop.instructions] == [0x40, 0x50, 0x60, 0x70, 0x80, 0x90]
    assert (found.main_loop.bytes("LDG"), found.main_loop.bytes("STG")) == (32, 16)
    outer = max(found.loops, key=lambda loop: len(loop.instructions))
    assert [each.address for each in outer.instructions] == list(range(0x20, 0xC0, 0x10))
    assert [each.width for each in outer.accesses] == [16, 16, 16, 1]
    # Of the two loops and the one that only ends the code: nothing reaches that.
    assert len(found.loops) == 2


def test_of_loops_with_wide_accesses_the_deepest_is_the_main_one(dump: str) -> None:
    """A loop beside it, around no other, may move more."""
    wide = "STG.E.128 [R6.64], R4 ;"
    beside = "".join(
        f"        /*{address:04x}*/                   {line}                     /* 0x0 */\n"
        for address, line in [(0x120, wide), (0x130, wide), (0x140, wide), (0x150, wide), (0x160, "NOP ;")]
    )
    beside += "        /*0170*/               @P0 BRA 0x120 ;                     /* 0x0 */\n"
    beside += "        /*0180*/                   EXIT ;                          /* 0x0 */\n"
    text = dump.format(architecture="sm_80", called="0x100", width=".128")
    text = text.replace("EXIT ;  ", "BRA 0x120 ;", 1).replace("\t\t.........", beside + "\t\t.........")
    (found,) = sass.functions(text)
    assert sorted(each.bytes("STG", 16) for each in found.loops) == [16, 16, 64]
    assert found.main_loop is not None
    assert found.main_loop.instructions[0].address == 0x40


def test_a_call_under_a_condition_leaves_a_loop_and_is_no_subroutine(dump: str) -> None:
    text = dump.format(architecture="sm_80", called="0x100", width=".128")
    text = text.replace("@P2 BRA 0x20", "@P2 CALL.REL.NOINC 0xd0").replace("EXIT ;", "BRA 0x20 ;", 1)
    (found,) = sass.functions(text.replace("BRA 0xd0;", "EXIT ;"))
    assert found.divisions_in_loops == 0
    assert max(len(each.instructions) for each in found.loops) == 11


def test_a_narrow_access_has_its_width(dump: str) -> None:
    widths = {"": 4, ".64": 8, ".U16": 2, ".S8": 1}
    for name, wanted in widths.items():
        (found,) = sass.functions(dump.format(architecture="sm_90", called="0xe0", width=name))
        assert found.main_loop is not None
        assert sorted(each.width for each in found.main_loop.accesses) == sorted([wanted, 16, 16])
        assert found.main_loop.bytes("LDG", least=16) == 16


def test_a_load_of_the_programs_constants_is_no_access(dump: str) -> None:
    (found,) = sass.functions(dump.format(architecture="sm_90", called="0xe0", width=".CONSTANT"))
    assert found.main_loop is not None
    assert [each.width for each in found.main_loop.accesses] == [16, 16]


def test_nothing_follows_a_trap(dump: str) -> None:
    """Behind it lies what only diverged lanes run, which jumps back into the loop."""
    text = dump.format(architecture="sm_90", called="0x100", width=".128")
    text = text.replace("@!P1 BRA 0x70 ", "@!P1 BRA 0xe0 ").replace("RET.REL.NODEC R8 0x0", "BRA 0x70", 1)
    lengths = []
    for opcode in ("BPT.TRAP 0x1", "NOP"):
        (found,) = sass.functions(text.replace("I2F.U64.RP R8, R4", opcode))
        assert found.main_loop is not None
        lengths.append(len(found.main_loop.instructions))
    assert lengths == [6, 8]


def test_a_call_of_the_64_bit_division_counts_only_in_a_loop(dump: str) -> None:
    (divides,) = sass.functions(dump.format(architecture="sm_90", called="0xe0", width=".128"))
    (from_root,) = sass.functions(dump.format(architecture="sm_90", called="0x100", width=".128"))
    assert (divides.divisions_in_loops, from_root.divisions_in_loops) == (1, 0)
    once = dump.replace("@P2 BRA 0x20", "@P2 BRA 0x40").format(
        architecture="sm_90", called="0xe0", width=".128"
    )
    (before_the_loop,) = sass.functions(once)
    assert before_the_loop.divisions_in_loops == 0


def test_a_block_behind_the_loop_that_jumps_back_into_it_belongs_to_it(dump: str) -> None:
    text = dump.format(architecture="sm_90", called="0xe0", width=".128")
    aside = text.replace("@!P1 BRA 0x70 ", "@!P1 BRA 0x100 ").replace("0x110*/                   RET", "")
    aside = aside.replace("/*0110*/                   RET.REL.NODEC R8 0x0 ;", "/*0110*/   BRA 0x70 ;")
    (found,) = sass.functions(aside)
    assert found.main_loop is not None
    assert [each.address for each in found.main_loop.instructions] == [
        *range(0x40, 0xA0, 0x10),
        0x100,
        0x110,
    ]


def test_kernels_of_several_architectures_are_distinguished(dump: str) -> None:
    both = "".join(dump.format(architecture=name, called="0xe0", width=".128") for name in ("sm_80", "sm_90"))
    assert [(each.name, each.architecture) for each in sass.functions(both)] == [
        ("kernel", "sm_80"),
        ("kernel", "sm_90"),
    ]
    assert list(sass.functions("\n\tcode for sm_90\n")) == []
