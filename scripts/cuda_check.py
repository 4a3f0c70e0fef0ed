"""Compiles every file of module zero_ext._C_cuda, links nothing, needs no GPU: `make cuda-check`.

The headers are those of the oldest torch that is supported, from its wheel, which is fetched once and without
what it depends on; the sources of the other two modules are held against them as well. `--headers installed`
takes those of the torch that is installed, for the kernels alone. Warnings of nvcc are errors, and so is a
kernel that spills registers or takes more shared memory than every GPU gives. What the assembler says of each
kernel is kept in build/cuda/kernels.txt, and with `--report docs/cuda_kernels.md` as a table there. Without
nvcc nothing is checked, and a line says so. MAX_JOBS files are compiled at a time, by default one.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "zero_ext" / "ops"))

import toolchain  # noqa: E402  by its folder: the package would load its built module
import torch  # noqa: E402

OUTPUT = ROOT / "build" / "cuda"
OLDEST = "{}.{}.0".format(*toolchain.OLDEST_TORCH)
HEADERS = ROOT / "build" / f"torch-{OLDEST}"
INCLUDES = "torch/include/"

SHARED_BYTES = 48 << 10  # that every GPU gives a block without being asked

KERNEL = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for '(?P<architecture>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, "
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)
ABOUT_KERNELS = re.compile(r"ptxas info|\s+\d+ bytes stack frame")
SHARED = re.compile(r"(\d+) bytes smem")
NAMESPACES = re.compile(r"zero_ext::(?:core|cuda)::(?:\(anonymous namespace\)::)?")


@dataclass(frozen=True)
class Kernel:
    """What the assembler says of one kernel on one architecture."""

    file: str
    name: str  # as in the source, without namespaces
    architecture: str
    registers: int
    spilled_bytes: int
    stack_bytes: int
    shared_bytes: int


def oldest_headers() -> Path:
    """The include folder of the oldest supported torch.

    Raises:
        RuntimeError: its wheel cannot be fetched.
    """
    found = HEADERS / INCLUDES
    if found.is_dir():
        return found
    pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "-q", "--no-deps"]
    HEADERS.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=HEADERS.parent) as folder:
        done = subprocess.run([*pip, "-d", folder, f"torch=={OLDEST}"], check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode != 0 or not wheels:
            raise RuntimeError(
                f"torch {OLDEST}: expected its wheel, got none from pip. Give it a package index, or take "
                "--headers installed."
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(
                Path(folder) / "unpacked",
                [name for name in wheel.namelist() if name.startswith(INCLUDES)],
            )
        (Path(folder) / "unpacked").rename(HEADERS)
    return found


def include_flags(headers: Path) -> list[str]:
    """Torch's headers, in which nobody looks for warnings, and Python's."""
    places = (headers, headers / "torch" / "csrc" / "api" / "include", Path(sysconfig.get_path("include")))
    return [flag for path in places for flag in ("-isystem", str(path))]


def check_host_modules(headers: Path) -> None:
    """Modules _C and _C_storage against `headers`, without making code.

    Raises:
        RuntimeError: the compiler refused a file or warned; its output is in the message.
    """
    modules = {
        toolchain.DEFINES: toolchain.sources(ROOT),
        toolchain.STORAGE_DEFINES: list(toolchain.STORAGE_SOURCES),
    }
    compiler = os.environ.get("CXX", "c++")
    for defines, names in modules.items():
        with_torch = [name for name in names if "core/" not in name]
        macros = [f"-D{key}={value}" for key, value in defines]
        call = [compiler, *toolchain.COMPILE_FLAGS, "-Werror", "-fsyntax-only", *macros]
        for name in with_torch:
            result = subprocess.run(
                [*call, *include_flags(headers), name], cwd=ROOT, capture_output=True, text=True, check=False
            )
            if result.returncode != 0:
                raise RuntimeError(f"{name} does not compile with {headers}:\n{result.stderr}")
        print(f"{len(with_torch)} files fit {headers.relative_to(ROOT)}", flush=True)


def command(name: str, nvcc: str, headers: Path) -> list[str]:
    """The compiler call for one source file."""
    if name.endswith(".cu"):
        call = [nvcc, *toolchain.NVCC_FLAGS, "-Werror=all-warnings", "-Xcompiler=-Werror", "-Xptxas=-v"]
    else:
        call = [os.environ.get("CXX", "c++"), *toolchain.COMPILE_FLAGS]
    call += [f"-D{key}={value}" for key, value in toolchain.CUDA_DEFINES]
    call += include_flags(headers)
    return [*call, "-c", name, "-o", str(OUTPUT / (name.replace("/", "_") + ".o"))]


def compile_file(name: str, nvcc: str, headers: Path) -> list[Kernel]:
    """The kernels of one source file.

    Raises:
        RuntimeError: the compiler refused the file or warned; its output is in the message.
    """
    result = subprocess.run(
        command(name, nvcc, headers), cwd=ROOT, capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        said = [
            line for line in (result.stdout + result.stderr).splitlines() if not ABOUT_KERNELS.match(line)
        ]
        raise RuntimeError("\n".join([f"{name} does not compile:", *said]))
    kernels = read_kernels(name, result.stdout + result.stderr)
    print(f"{name}: {len(kernels)} kernels", flush=True)
    return kernels


def read_kernels(file: str, text: str) -> list[Kernel]:
    """The kernels of a source file, from what the assembler said."""
    found = list(KERNEL.finditer(text))
    names = readable([each["name"] for each in found])
    kernels = []
    for each, name in zip(found, names, strict=True):
        shared = SHARED.search(each["rest"])
        kernels.append(
            Kernel(
                file,
                name,
                each["architecture"],
                int(each["registers"]),
                int(each["stores"]) + int(each["loads"]),
                int(each["stack"]),
                int(shared[1]) if shared else 0,
            )
        )
    return kernels


def readable(names: list[str]) -> list[str]:
    """The kernels' names as in the sources: of `run_kernel<Object>` and its like, the object."""
    if not names:
        return []
    result = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    found = []
    for line in result.stdout.splitlines():
        plain = NAMESPACES.sub("", line).replace(" >", ">")
        call = re.search(r"run_\w+<(.*)>\(", plain)
        found.append(call[1] if call else plain)
    return found


def report(kernels: Sequence[Kernel]) -> str:
    """One line for each kernel: architecture, registers, spilled bytes, stack, shared memory, name."""
    lines = [
        f"{kernel.architecture} {kernel.registers:4} registers {kernel.spilled_bytes:6} bytes spilled "
        f"{kernel.stack_bytes:6} stack {kernel.shared_bytes:6} shared  {kernel.name}"
        for kernel in kernels
    ]
    return "\n".join(sorted(lines)) + "\n"


def table(kernels: Sequence[Kernel], compiler: str) -> str:
    """The report as Markdown: a row for each kernel, registers for each architecture."""
    architectures = sorted({kernel.architecture for kernel in kernels})
    by_kernel: dict[tuple[str, str], dict[str, Kernel]] = {}
    for kernel in kernels:
        by_kernel.setdefault((kernel.file, kernel.name), {})[kernel.architecture] = kernel
    spilling = sum(kernel.spilled_bytes > 0 for kernel in kernels)
    lines = [
        "# CUDA kernels",
        "",
        "What nvcc's assembler says of every kernel of module `_C_cuda`, written by",
        "`python scripts/cuda_check.py --report docs/cuda_kernels.md`. Nothing here was measured on a GPU.",
        "",
        f"{compiler}; {', '.join(architectures)}, and PTX for later GPUs. {len(by_kernel)} kernels, "
        f"{spilling} with spilled registers.",
        "A block has 256 threads, of attention at most 128; with at most 128 registers a thread a processor",
        "holds two blocks of 256. Stack is bytes a thread, shared memory bytes a block, without the one that",
        "attention is given at its launch (`csrc/cuda/attention/attention_shape.h`: at most 99 KiB).",
    ]
    for file in sorted({file for file, _ in by_kernel}):
        lines += ["", f"## {file}", ""]
        lines.append(f"| kernel | registers {' | '.join(architectures)} | spilled | stack | shared |")
        lines.append("| --- | " + " | ".join(["---:"] * (len(architectures) + 3)) + " |")
        for (of_file, name), found in sorted(by_kernel.items()):
            if of_file != file:
                continue
            registers = [str(found[each].registers) if each in found else "" for each in architectures]
            most = [
                str(max(getattr(each, field) for each in found.values()))
                for field in ("spilled_bytes", "stack_bytes", "shared_bytes")
            ]
            lines.append(f"| `{name}` | {' | '.join([*registers, *most])} |")
    return "\n".join(lines) + "\n"


def faults(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Kernels that spill registers or take more shared memory than every GPU gives."""
    return [kernel for kernel in kernels if kernel.spilled_bytes > 0 or kernel.shared_bytes > SHARED_BYTES]


def version_of(nvcc: str) -> str:
    """The compiler's name and version, as `nvcc 13.0.88`."""
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"\bV(\d[\d.]*)", said)
    return f"nvcc {found[1]}" if found else "nvcc"


def main() -> int:
    parser = argparse.ArgumentParser(description="Compiles the CUDA kernels; needs nvcc, no GPU.")
    parser.add_argument("--report", type=Path, help="also write a table of all kernels, as Markdown")
    parser.add_argument("--headers", choices=("oldest", "installed"), default="oldest", help="which torch's")
    options = parser.parse_args()
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        print("SKIPPED: the CUDA kernels were not compiled, because nvcc is not on PATH")
        return 0
    OUTPUT.mkdir(parents=True, exist_ok=True)
    try:
        if options.headers == "oldest":
            headers = oldest_headers()
            check_host_modules(headers)
        else:
            headers = Path(torch.__file__).parent / "include"
        with ThreadPoolExecutor(max_workers=int(os.environ.get("MAX_JOBS", "1"))) as pool:
            names = toolchain.cuda_sources(ROOT)
            files = list(pool.map(lambda name: compile_file(name, nvcc, headers), names))
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    kernels = [kernel for found in files for kernel in found]
    (OUTPUT / "kernels.txt").write_text(report(kernels))
    if options.report is not None:
        options.report.write_text(table(kernels, version_of(nvcc)))
    wrong = faults(kernels)
    print(
        f"{len(kernels)} kernels, at most {max(kernel.registers for kernel in kernels)} registers, "
        f"{len(wrong)} with spills or too much shared memory: see "
        f"{(OUTPUT / 'kernels.txt').relative_to(ROOT)}"
    )
    if wrong:
        print(report(wrong), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
