"""Compiles the sources of module zero_ext._C_cuda and reads what nvcc's assembler says of each kernel."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# By its path: the package would load its built module.
_spec = importlib.util.spec_from_file_location(
    "cuda_check_toolchain", ROOT / "zero_ext" / "ops" / "jit" / "toolchain.py"
)
assert _spec is not None and _spec.loader is not None
toolchain = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = toolchain
_spec.loader.exec_module(toolchain)

OUTPUT = ROOT / "build" / "cuda"
OLDEST = "{}.{}.0".format(*toolchain.OLDEST_TORCH)
HEADERS = ROOT / "build" / f"torch-{OLDEST}"
INCLUDES = "torch/include/"

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
    symbol: str  # its name in the object file
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
    folders = (headers, headers / "torch" / "csrc" / "api" / "include", Path(sysconfig.get_path("include")))
    return [flag for path in folders for flag in ("-isystem", str(path))]


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


def object_of(name: str) -> Path:
    """Where the object file of a source file is put."""
    return OUTPUT / (name.replace("/", "_") + ".o")


def command(name: str, nvcc: str, headers: Path) -> list[str]:
    """The compiler call for one source file."""
    if name.endswith(".cu"):
        call = [nvcc, *toolchain.NVCC_FLAGS, "-Werror=all-warnings", "-Xcompiler=-Werror", "-Xptxas=-v"]
    else:
        call = [os.environ.get("CXX", "c++"), *toolchain.COMPILE_FLAGS]
    call += [f"-D{key}={value}" for key, value in toolchain.CUDA_DEFINES]
    call += include_flags(headers)
    return [*call, "-c", name, "-o", str(object_of(name))]


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
                each["name"],
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


def version_of(nvcc: str) -> str:
    """The compiler's name and version, as `nvcc 13.0.88`."""
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"\bV(\d[\d.]*)", said)
    return f"nvcc {found[1]}" if found else "nvcc"
