"""What can be known of module _C_cuda without a GPU; csrc/tests runs its kernels on the host."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import zero_ext.ops  # noqa: F401  registers the ops
from zero_ext.ops.jit import toolchain

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


def ops_of(path: Path) -> list[str]:
    """The ops that a file implements: by name, or those of all rules."""
    text = path.read_text()
    names = re.findall(r'library\.impl\("(\w+)"', text)
    if "library.impl(Rule::kOp" in text:
        rules = sorted((ROOT / "csrc" / "core" / "optimizers").glob("*_rule.h"))
        names += [name for rule in rules for name in re.findall(r'kOp = "(\w+)"', rule.read_text())]
    return names


def test_kernels_implement_ops_that_module_c_declares() -> None:
    names = [name for path in sorted(CUDA.rglob("*.cu")) for name in ops_of(path)]
    assert "adam_step_" in names and len(names) == len(set(names))
    for name in names:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"zero_ext::{name}", "CPU")


def test_kernel_headers_need_neither_torch_nor_the_cuda_headers() -> None:
    headers = sorted(CUDA.rglob("*.h"))
    assert len(headers) > 5
    pattern = re.compile(r'#\s*include\s*[<"](torch|cuda|ATen|c10|.*\bops/|.*\.cuh)')
    assert [path.name for path in headers if pattern.search(path.read_text())] == []


def test_the_table_in_docs_has_every_kernel_file_and_no_other() -> None:
    text = (ROOT / "docs" / "contributing" / "cuda_kernels.md").read_text()
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
        assert re.findall(r"`(\w+)`", rows[path.relative_to(CUDA).as_posix()]) == ops_of(path)
