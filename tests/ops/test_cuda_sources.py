"""What can be known of module _C_cuda without a GPU; csrc/tests runs its kernels on the host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import torch

import zero_ext.ops  # noqa: F401  registers the ops
from zero_ext.ops import toolchain

ROOT = Path(__file__).resolve().parents[2]
CUDA = ROOT / "csrc" / "cuda"


def test_every_file_of_the_folder_is_compiled_and_every_shared_one_exists() -> None:
    sources = toolchain.cuda_sources(ROOT)
    assert len(sources) == len(set(sources))
    for path in CUDA.rglob("*"):
        known = sources if path.suffix in {".cu", ".cpp"} else toolchain.cuda_headers(ROOT)
        assert path.relative_to(ROOT).as_posix() in known
    assert [name for name in sources if not (ROOT / name).is_file()] == []
    assert set(toolchain.CUDA_SHARED_SOURCES) <= set(toolchain.sources(ROOT))


def test_kernels_implement_ops_that_module_c_declares() -> None:
    text = "".join(path.read_text() for path in sorted(CUDA.glob("*.cu")))
    names = re.findall(r'library\.impl\("(\w+)"', text)
    assert "adam_step_" in names and len(names) == len(set(names))
    for name in names:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"zero_ext::{name}", "CPU")


def test_kernel_headers_need_neither_torch_nor_the_cuda_headers() -> None:
    headers = sorted(CUDA.glob("*.h"))
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
