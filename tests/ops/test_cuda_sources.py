"""What can be known of module _C_cuda without a GPU; csrc/tests runs its kernels on the host."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import torch

import zero_ext.ops  # noqa: F401  registers the ops
from zero_ext.ops import toolchain

ROOT = Path(__file__).resolve().parents[2]
CUDA = ROOT / "csrc" / "cuda"


def test_every_file_of_the_folder_is_compiled_and_every_shared_one_exists() -> None:
    sources = toolchain.cuda_sources(ROOT)
    assert len(sources) == len(set(sources))
    for path in {path for path in CUDA.rglob("*") if path.is_file()} - {CUDA / "README.md"}:
        known = sources if path.suffix in {".cu", ".cpp"} else toolchain.cuda_headers(ROOT)
        assert path.relative_to(ROOT).as_posix() in known
    assert [name for name in sources if not (ROOT / name).is_file()] == []
    assert set(toolchain.CUDA_SHARED_SOURCES) <= set(toolchain.sources(ROOT))


def test_kernels_implement_ops_that_module_c_declares() -> None:
    text = "".join(path.read_text() for path in sorted(CUDA.rglob("*.cu")))
    names = re.findall(r'library\.impl\("(\w+)"', text)
    assert "adam_step_" in names and len(names) == len(set(names))
    for name in names:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"zero_ext::{name}", "CPU")


def test_kernel_headers_need_neither_torch_nor_the_cuda_headers() -> None:
    headers = sorted(CUDA.rglob("*.h"))
    assert len(headers) > 5
    pattern = re.compile(r'#\s*include\s*[<"](torch|cuda|ATen|c10|.*\bops/|.*\.cuh)')
    assert [path.name for path in headers if pattern.search(path.read_text())] == []


def test_the_check_says_so_when_there_is_no_nvcc(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "cuda_check.py")],
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == "SKIPPED: the CUDA kernels were not compiled, because nvcc is not on PATH\n"


def load_check() -> ModuleType:
    """The script, by its path: scripts are no package."""
    spec = importlib.util.spec_from_file_location("cuda_check", ROOT / "scripts" / "cuda_check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["cuda_check"] = module
    spec.loader.exec_module(module)
    return module


ASSEMBLER = """
ptxas info    : 1084 bytes gmem
ptxas info    : Compiling entry function '_ZN8zero_ext4cuda10run_kernelINS0_9SumShardsIfNS_4core8BFloat16EEEEEvT_' for 'sm_80'
ptxas info    : Function properties for _ZN8zero_ext4cuda10run_kernelINS0_9SumShardsIfNS_4core8BFloat16EEEEEvT_
    48 bytes stack frame, {spilled} bytes spill stores, 8 bytes spill loads
ptxas info    : Used 61 registers, used 0 barriers, 48 bytes cumulative stack size, {shared} bytes smem, 440 bytes cmem[0]
ptxas info    : Compiling entry function '_ZN8zero_ext4cuda10run_kernelINS0_9SumShardsIfNS_4core8BFloat16EEEEEvT_' for 'sm_90'
ptxas info    : Function properties for _ZN8zero_ext4cuda10run_kernelINS0_9SumShardsIfNS_4core8BFloat16EEEEEvT_
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 72 registers, used 0 barriers
"""  # noqa: E501  as the assembler writes it


def test_what_the_assembler_says_becomes_a_row_and_a_fault() -> None:
    check = load_check()
    kernels = check.read_kernels("flat.cu", ASSEMBLER.format(spilled=4, shared=2112))
    assert [(kernel.name, kernel.architecture) for kernel in kernels] == [
        ("SumShards<float, BFloat16>", "sm_80"),
        ("SumShards<float, BFloat16>", "sm_90"),
    ]
    first, second = kernels
    assert (first.registers, first.spilled_bytes, first.stack_bytes, first.shared_bytes) == (61, 12, 48, 2112)
    assert check.faults(kernels) == [first]
    text = check.table(kernels, "nvcc 1.2")
    assert "| `SumShards<float, BFloat16>` | 61 | 72 | 12 | 48 | 2112 |" in text
    assert "nvcc 1.2; sm_80, sm_90" in text and "1 kernels, 1 with spilled" in text
    greedy = check.read_kernels("flat.cu", ASSEMBLER.format(spilled=0, shared=48 * 1024 + 1))
    assert check.faults([second]) == [] and greedy[0] in check.faults(greedy)


def test_the_table_in_docs_has_every_kernel_file_and_no_other() -> None:
    text = (ROOT / "docs" / "cuda_kernels.md").read_text()
    listed = re.findall(r"^## (\S+)$", text, re.MULTILINE)
    assert listed == sorted(path.relative_to(ROOT).as_posix() for path in CUDA.rglob("*.cu"))
    assert "0 with spilled registers" in text


def test_the_readme_lists_the_ops_of_every_file() -> None:
    rows = dict(
        re.findall(r"^\| `(\w+/\w+\.cu)` \| (.*) \|$", (CUDA / "README.md").read_text(), re.MULTILINE)
    )
    files = sorted(CUDA.rglob("*.cu"))
    assert sorted(rows) == [path.relative_to(CUDA).as_posix() for path in files]
    for path in files:
        named = re.findall(r'library\.impl\("(\w+)"', path.read_text())
        assert re.findall(r"`(\w+)`", rows[path.relative_to(CUDA).as_posix()]) == named
