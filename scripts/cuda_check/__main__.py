"""Compiles every file of module zero_ext._C_cuda, links nothing, needs no GPU: `make cuda-check`.

The headers are those of the oldest torch that is supported, from its wheel, which is fetched once and without
what it depends on; the sources of the other two modules are held against them as well. `--headers installed`
takes those of the torch that is installed, for the kernels alone. Warnings of nvcc are errors.

Each kernel's machine code is then read with cuobjdump. A kernel fails that traps, spills registers, takes
more shared memory than every GPU gives, or streams through memory in accesses of fewer than 16 bytes or with
a 64-bit division in a loop. What is known of each kernel is kept in build/cuda/kernels.txt, and with
`--report docs/contributing/cuda_kernels.md` as a table.
`--only csrc/cuda/flat` checks the files whose paths begin so. Without nvcc nothing is checked, and without
cuobjdump no machine code is read; a line says so. MAX_JOBS files are compiled at a time, by default one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scripts.cuda_check import compiler, disassembler, streams
from scripts.cuda_check.compiler import ROOT, Kernel, toolchain
from scripts.cuda_check.disassembler import Code
from scripts.cuda_check.report import Checked, lines, table


def check_file(name: str, nvcc: str, cuobjdump: Path | None, headers: Path) -> list[Checked]:
    """The kernels of one source file.

    Raises:
        RuntimeError: the compiler refused the file or warned, a kernel traps, or a streaming one has no main
            loop.
    """
    kernels = compiler.compile_file(name, nvcc, headers)
    if cuobjdump is None or not kernels:
        return [Checked(kernel, None, None) for kernel in kernels]
    codes = disassembler.disassemble(cuobjdump, compiler.object_of(name))
    checked = []
    for kernel in kernels:
        code = codes[(kernel.symbol, kernel.architecture)]
        refuse_trap(kernel, code)
        checked.append(Checked(kernel, code, streams.stream(kernel.name, code)))
    return checked


def refuse_trap(kernel: Kernel, code: Code) -> None:
    """Raise ``RuntimeError`` for a kernel that ends the process's CUDA context when it finds an error."""
    if code.traps:
        raise RuntimeError(
            f"{kernel.file}: {kernel.architecture} {kernel.name}: expected no BPT.TRAP, got one. Record the "
            "error (csrc/cuda/common/error_recording.h) and make what follows harmless."
        )


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.cuda_check", description="Compiles the CUDA kernels; needs nvcc, no GPU."
    )
    parser.add_argument("--report", type=Path, help="also write a table of all kernels, as Markdown")
    parser.add_argument("--headers", choices=("oldest", "installed"), default="oldest", help="which torch's")
    parser.add_argument("--only", default="csrc/", help="the files whose paths begin so; by default all")
    return parser.parse_args(arguments)


def headers_of(which: str, all_headers: bool) -> Path:
    """The include folder of the oldest supported torch or of the installed one."""
    if which == "oldest":
        found = compiler.oldest_headers()
        if all_headers:
            compiler.check_host_modules(found)
        return found
    import torch

    return Path(torch.__file__).parent / "include"


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = options(arguments)
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        print("SKIPPED: the CUDA kernels were not compiled, because nvcc is not on PATH")
        return 0
    cuobjdump = disassembler.find()
    if cuobjdump is None:
        print(
            "SKIPPED: no machine code is read, because cuobjdump is not on PATH. "
            f"Run pip install {disassembler.PACKAGES}."
        )
    compiler.OUTPUT.mkdir(parents=True, exist_ok=True)
    names = [name for name in toolchain.cuda_sources(ROOT) if name.startswith(chosen.only)]
    try:
        headers = headers_of(chosen.headers, all_headers=chosen.only == "csrc/")
        with ThreadPoolExecutor(max_workers=int(os.environ.get("MAX_JOBS", "1"))) as pool:
            files = list(pool.map(lambda name: check_file(name, nvcc, cuobjdump, headers), names))
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    checked = [each for found in files for each in found]
    listing = compiler.OUTPUT / "kernels.txt"
    listing.write_text(lines(checked))
    if chosen.report is not None:
        chosen.report.write_text(table(checked, compiler.version_of(nvcc)))
    faults = [fault for each in checked for fault in each.faults]
    most = max((each.kernel.registers for each in checked), default=0)
    path = listing.relative_to(ROOT)
    print(f"{len(checked)} kernels, at most {most} registers, {len(faults)} faults: see {path}")
    print("".join(f"{fault}\n" for fault in faults), end="", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
