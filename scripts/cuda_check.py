"""Compiles every file of module zero_ext._C_cuda, links nothing, needs no GPU: `make cuda-check`.

The headers of any torch serve, those of the CPU's too. Warnings of nvcc are errors, and so is a kernel that
spills registers. What the assembler says of each kernel is kept in build/cuda/kernels.txt. Without nvcc
nothing is checked, and a line says so. MAX_JOBS files are compiled at a time, by default one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "zero_ext" / "ops"))

import toolchain  # noqa: E402  by its folder: the package would load its built module
import torch  # noqa: E402

OUTPUT = ROOT / "build" / "cuda"

KERNEL = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for '(?P<architecture>\w+)'.*?"
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers",
    re.DOTALL,
)


@dataclass(frozen=True)
class Kernel:
    """What the assembler says of one kernel on one architecture."""

    name: str
    architecture: str
    registers: int
    spilled_bytes: int


def command(name: str, nvcc: str) -> list[str]:
    """The compiler call for one source file."""
    includes = [Path(torch.__file__).parent / "include", Path(sysconfig.get_path("include"))]
    if name.endswith(".cu"):
        call = [nvcc, *toolchain.NVCC_FLAGS, "-Werror=all-warnings", "-Xcompiler=-Werror", "-Xptxas=-v"]
    else:
        call = [os.environ.get("CXX", "c++"), *toolchain.COMPILE_FLAGS]
    call += [f"-D{key}={value}" for key, value in toolchain.CUDA_DEFINES]
    call += [flag for path in includes for flag in ("-isystem", str(path))]
    return [*call, "-c", name, "-o", str(OUTPUT / (name.replace("/", "_") + ".o"))]


def compile_file(name: str, nvcc: str) -> list[Kernel]:
    """The kernels of one source file.

    Raises:
        RuntimeError: the compiler refused the file or warned; its output is in the message.
    """
    result = subprocess.run(command(name, nvcc), cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{name} does not compile:\n{result.stdout}{result.stderr}")
    found = KERNEL.finditer(result.stdout + result.stderr)
    kernels = [
        Kernel(
            each["name"],
            each["architecture"],
            int(each["registers"]),
            int(each["stores"]) + int(each["loads"]),
        )
        for each in found
    ]
    print(f"{name}: {len(kernels)} kernels", flush=True)
    return kernels


def readable(names: list[str]) -> list[str]:
    """The kernels' names as in the sources."""
    result = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    return result.stdout.splitlines()


def report(kernels: list[Kernel]) -> str:
    """One line for each kernel: architecture, registers, spilled bytes, name."""
    names = readable([kernel.name for kernel in kernels])
    lines = [
        f"{kernel.architecture} {kernel.registers:4} registers {kernel.spilled_bytes:6} bytes spilled  {name}"
        for kernel, name in zip(kernels, names, strict=True)
    ]
    return "\n".join(sorted(lines)) + "\n"


def main() -> int:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        print("SKIPPED: the CUDA kernels were not compiled, because nvcc is not on PATH")
        return 0
    OUTPUT.mkdir(parents=True, exist_ok=True)
    try:
        with ThreadPoolExecutor(max_workers=int(os.environ.get("MAX_JOBS", "1"))) as pool:
            files = list(pool.map(lambda name: compile_file(name, nvcc), toolchain.cuda_sources(ROOT)))
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    kernels = [kernel for found in files for kernel in found]
    (OUTPUT / "kernels.txt").write_text(report(kernels))
    spilling = [kernel for kernel in kernels if kernel.spilled_bytes > 0]
    print(
        f"{len(kernels)} kernels, at most {max(kernel.registers for kernel in kernels)} registers, "
        f"{len(spilling)} with spills: see {(OUTPUT / 'kernels.txt').relative_to(ROOT)}"
    )
    if spilling:
        print(report(spilling), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
