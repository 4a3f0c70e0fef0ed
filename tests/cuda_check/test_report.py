"""What the assembler and the machine code say, as rows and faults."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from scripts.cuda_check import compiler, sass, streams
from scripts.cuda_check.disassembler import Code
from scripts.cuda_check.report import Checked, lines, table

ROOT = Path(__file__).resolve().parents[2]
SYMBOL = "_ZN8zero_ext4cuda10run_kernelINS0_9SumShardsIfNS_4core8BFloat16EEEEEvT_"
ASSEMBLER = """
ptxas info    : 1084 bytes gmem
ptxas info    : Compiling entry function '{symbol}' for 'sm_80'
ptxas info    : Function properties for {symbol}
    48 bytes stack frame, {spilled} bytes spill stores, 8 bytes spill loads
ptxas info    : Used 61 registers, used 0 barriers, 48 bytes cumulative stack size, {shared} bytes smem
ptxas info    : Compiling entry function '{symbol}' for 'sm_90'
ptxas info    : Function properties for {symbol}
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 72 registers, used 0 barriers
"""


def kernels(spilled: int = 4, shared: int = 2112) -> list[compiler.Kernel]:
    return compiler.read_kernels("flat.cu", ASSEMBLER.format(symbol=SYMBOL, spilled=spilled, shared=shared))


def checked(kernel: compiler.Kernel, text: str) -> Checked:
    (function,) = sass.functions(text)
    code = Code(function, threads=256)
    return Checked(kernel, code, streams.stream(kernel.name, code))


def test_what_the_assembler_says_becomes_a_row_and_a_fault() -> None:
    found = kernels()
    assert [(each.symbol, each.name, each.architecture) for each in found] == [
        (SYMBOL, "SumShards<float, BFloat16>", "sm_80"),
        (SYMBOL, "SumShards<float, BFloat16>", "sm_90"),
    ]
    first, second = (Checked(each, None, None) for each in found)
    own = first.kernel
    assert (own.registers, own.spilled_bytes, own.stack_bytes, own.shared_bytes) == (61, 12, 48, 2112)
    assert first.faults == ["sm_80 SumShards<float, BFloat16>: expected no spilled registers, got 12 bytes."]
    assert second.faults == []
    text = table([first, second], "nvcc 1.2")
    assert "| `SumShards<float, BFloat16>` | 61 | 72 | 12 | 48 | 2112 |" in text
    assert "nvcc 1.2; sm_80, sm_90" in text and "1 kernels, 1 with spilled" in text
    greedy = Checked(kernels(shared=48 * 1024 + 1)[0], None, None)
    assert any("expected at most 49152 bytes of shared memory, got 49153" in each for each in greedy.faults)


def test_machine_code_becomes_columns_and_a_fault(dump: str) -> None:
    second = kernels()[1]
    wide = checked(second, dump.format(architecture="sm_90", called="0x100", width=".128"))
    assert wide.faults == []
    # 72 registers leave room for 3 blocks of 8 warps; 48 bytes of 2 for each element in 6 instructions.
    cells = "| 72 | 0 | 0 | 0 | 38% | 2 | 0.2 | 3 x 16 | 100% |"
    assert f"| `SumShards<float, BFloat16>` {cells}" in table([wide], "nvcc 1.2")
    assert "copy rate estimated 100%  SumShards" in lines([wide])
    narrow = checked(second, dump.format(architecture="sm_90", called="0x100", width=".64"))
    assert narrow.faults == [
        "sm_90 SumShards<float, BFloat16>: expected accesses of 16 bytes in the main loop, got 1 x 8, 2 x 16."
    ]
    assert "1 streaming kernels with an access of fewer" in table([narrow], "nvcc 1.2")


def test_a_64_bit_division_in_a_loop_of_a_streaming_kernel_is_a_fault(dump: str) -> None:
    divides = checked(kernels()[1], dump.format(architecture="sm_90", called="0xe0", width=".128"))
    assert divides.faults == [
        "sm_90 SumShards<float, BFloat16>: expected no 64-bit division in a loop, got 1."
    ]
    assert "1\nkernels with a 64-bit division" in table([divides], "nvcc 1.2")


def test_bytes_that_lack_outside_the_main_loop_are_a_fault(dump: str) -> None:
    (function,) = sass.functions(dump.format(architecture="sm_90", called="0x100", width=".128"))
    code = Code(function, threads=256)
    # The results of 32 elements are loaded, to be added to, and stored behind the loop of the messages.
    found = Checked(kernels()[1], code, streams.stream("Sum1bit", code))
    assert found.faults == [
        "sm_90 SumShards<float, BFloat16>: expected all bytes outside the main loop in accesses of 16, "
        "got 256 too few of a thread's."
    ]
    assert "1 streaming kernels with an access of fewer" in table([found], "nvcc 1.2")


def test_the_check_says_so_when_there_is_no_nvcc(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "scripts.cuda_check"],
        cwd=ROOT,
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == "SKIPPED: the CUDA kernels were not compiled, because nvcc is not on PATH\n"
