"""Occupancy and the estimated share of the copy rate."""

from __future__ import annotations

import pytest

from scripts.cuda_check import sass, streams
from scripts.cuda_check.disassembler import Code


@pytest.mark.parametrize(
    ("architecture", "threads", "registers", "shared", "warps"),
    [
        # From the occupancy tables of NVIDIA's programming guide: 64 warps, 65,536 registers.
        ("sm_80", 256, 32, 0, 64),
        ("sm_80", 256, 33, 0, 48),  # 40 registers per thread once rounded up: six blocks
        ("sm_80", 256, 128, 0, 16),
        ("sm_90", 256, 255, 0, 8),
        ("sm_90", 32, 32, 0, 32),  # at most 32 blocks
        ("sm_80", 256, 32, 40 << 10, 32),  # 164 KiB hold four blocks of 41
        ("sm_90", 256, 32, 40 << 10, 40),  # 228 KiB hold five
        ("sm_90", 1024, 128, 0, 0),
    ],
)
def test_occupancy(architecture: str, threads: int, registers: int, shared: int, warps: int) -> None:
    assert streams.occupancy(architecture, threads, registers, shared) == warps / 64


def code_of(text: str) -> Code:
    (function,) = sass.functions(text)
    return Code(function, threads=256)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("OptimizerStep<AdamRule, BFloat16, float, NoParam>", 8 + 8 + 4),
        ("OptimizerStep<AdamRule, float, BFloat16, Float16>", 8 + 16 + 2 + 2),
        ("OptimizerStep<LionRule, BFloat16, Float16, BFloat16>", 8 + 4 + 2 + 2),
        ("MoveSegments<float, BFloat16, AccumulateElement>", 8 + 2),
        ("MoveSegments<float, BFloat16, UnpackElement>", 4 + 2),
        ("AdamBlocks<BFloat16, NoParam>", 8 + 4 + 2),
        ("QuantizeIntegers<IntegerValues<BFloat16>, IntegerCode<4, true>>", 2 + 1 / 2),
        ("QuantizeIntegers<IntegerSum<4, false>, IntegerCode<8, false>>", 1 / 2),
        ("WriteIntegers<IntegerSum<8, true>, BFloat16>", 1 + 2 + 2),
        ("WriteIntegers<IntegerSum<8, false>, float>", 1),
        ("Decompress1bit<Float16>", 2 + 2),
        ("Compress1bit<SignSum>", 1 / 8),
    ],
)
def test_a_kernel_moves_what_its_types_say(dump: str, name: str, wanted: float) -> None:
    found = streams.stream(name, code_of(dump.format(architecture="sm_90", called="0xe0", width=".128")))
    assert found is not None
    assert found.bytes_per_element == wanted
    # 48 bytes a round and six instructions.
    assert found.elements == pytest.approx(48 / wanted)
    assert found.instructions_per_element == pytest.approx(6 * wanted / 48)
    assert (found.widths, found.narrow, found.loaded_bytes) == ((16, 16, 16), 0, 32)


def test_a_narrow_access_in_the_main_loop_is_counted(dump: str) -> None:
    text = dump.format(architecture="sm_90", called="0xe0", width=".64")
    found = streams.stream("MoveSegments<float, float, PackElement>", code_of(text))
    assert found is not None and found.narrow == 1


def test_arguments_of_templates_may_be_templates() -> None:
    name = "QuantizeIntegers<IntegerSum<4, false>, IntegerCode<8, true>>"
    assert streams.family(name) == ("QuantizeIntegers", ["IntegerSum<4, false>", "IntegerCode<8, true>"])
    assert streams.family("Sum1bit") == ("Sum1bit", [])


def test_a_kernel_without_a_main_loop_counts_what_it_does_once(dump: str) -> None:
    text = dump.format(architecture="sm_90", called="0x100", width=".128")
    straight = text.replace("@P0 BRA 0x40", "NOP").replace("@P2 BRA 0x20", "NOP")
    found = streams.stream("Compress1bit<SignValues<BFloat16>>", code_of(straight))
    assert found is not None
    # Values and errors are loaded, errors and words of bits stored, of 32 elements.
    loaded, stored = 32 * (2 + 4), 32 * 4 + 16
    assert found.bytes_per_element == (loaded + stored) / 32
    assert (found.widths, found.narrow, found.elements) == ((16, 16, 16), 0, 32)
    assert found.lacking_bytes == loaded - 32 + stored - 16
    looped = streams.stream("Compress1bit<SignValues<BFloat16>>", code_of(text))
    assert looped is not None and looped.lacking_bytes == loaded + stored


def test_other_kernels_do_not_stream_and_a_streaming_one_needs_a_main_loop(dump: str) -> None:
    text = dump.format(architecture="sm_90", called="0xe0", width=".128")
    assert streams.stream("PrepareSegments<AdamRule>", code_of(text)) is None
    straight = text.replace("@P0 BRA 0x40", "NOP").replace("@P2 BRA 0x20", "NOP")
    with pytest.raises(RuntimeError, match="FlagNonFinite<float>: expected a main loop"):
        streams.stream("FlagNonFinite<float>", code_of(straight))


def test_the_estimate_is_bound_by_instructions_or_by_bytes_in_flight() -> None:
    few = streams.Stream(8, 1, (16,), 64, 8)
    assert few.share_of_copy_rate(1.0) == 1.0
    rate = 132 * 4 * 32 * 1.755e9  # instructions of all threads in a second
    busy = streams.Stream(8, 200, (16,), 64, 8)
    assert busy.share_of_copy_rate(1.0) == pytest.approx(rate / 200 * 8 / 3.35e12)
    waiting = streams.Stream(8, 1, (16,), 16, 2)
    assert waiting.share_of_copy_rate(0.125) == pytest.approx(132 * 256 * 16 / (3.35e12 * 800e-9))
