"""Kernels that would end the process's CUDA context are refused."""

from __future__ import annotations

import pytest

from scripts.cuda_check import sass
from scripts.cuda_check.__main__ import refuse_trap
from scripts.cuda_check.compiler import Kernel
from scripts.cuda_check.disassembler import Code


def test_a_trap_is_found_in_machine_code(dump: str) -> None:
    kernel = Kernel("flat.cu", "symbol", "PackFlat<float>", "sm_90", 40, 0, 0, 0)
    text = dump.format(architecture="sm_90", called="0x100", width=".128")
    (clean,) = sass.functions(text)
    refuse_trap(kernel, Code(clean, 256))
    for trap in ("BPT.TRAP 0x1", "@P0 BPT.TRAP 0x1"):
        (trapping,) = sass.functions(text.replace("I2F.U64.RP R8, R4", trap))
        with pytest.raises(RuntimeError, match=r"flat\.cu: sm_90 PackFlat<float>: expected no BPT\.TRAP"):
            refuse_trap(kernel, Code(trapping, 256))
