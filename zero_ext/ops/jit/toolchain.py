"""The compilation of the C++ extension: sources, flags and macros, and the nvcc that fits torch.

Shared by setup.py, which loads this file by its path before the package exists, and by the
just-in-time build. It imports nothing but the standard library.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

# The oldest torch whose stable ABI the extension uses, and the oldest Python (limited API).
OLDEST_TORCH = (2, 11)
TORCH_TARGET_VERSION = "0x020b000000000000"
PYTHON_LIMITED_API = "0x030a0000"

DEFINES: tuple[tuple[str, str], ...] = (
    ("TORCH_TARGET_VERSION", TORCH_TARGET_VERSION),
    ("Py_LIMITED_API", PYTHON_LIMITED_API),
)

# Contraction is off so that every instruction set rounds alike; the kernels ask for fused
# multiply-adds where they want them.
COMPILE_FLAGS: tuple[str, ...] = (
    "-std=c++20",
    "-O3",
    "-g0",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
)

# Module ``_C_storage``, which uses more of torch than its stable ABI: built for the torch it runs in.
STORAGE_DEFINES: tuple[tuple[str, str], ...] = (("Py_LIMITED_API", PYTHON_LIMITED_API),)
STORAGE_SOURCES: tuple[str, ...] = ("csrc/swap_storage/swap_storage.cpp",)

# Module ``_C_cuda``. Contraction and rounding as above, so that float32 results are the CPU's bit for bit.
CUDA_DEFINES: tuple[tuple[str, str], ...] = (*DEFINES, ("USE_CUDA", "1"))
NVCC_COMPILE_FLAGS: tuple[str, ...] = (
    "-std=c++20",
    "-O3",
    "--expt-relaxed-constexpr",
    "--fmad=false",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-ffp-contract=off,-Wall,-Wextra",
)

# Compute capability: (8, 0) for 8.0.
Architecture = tuple[int, int]
OLDEST_ARCHITECTURE: Architecture = (8, 0)
# Machine code for 8.x and 9.0; later devices translate the PTX.
WHEEL_ARCHITECTURES: tuple[Architecture, ...] = ((8, 0), (9, 0))


def architecture_flags(architectures: Iterable[Architecture]) -> tuple[str, ...]:
    """nvcc's flags for machine code of all the architectures and PTX of the newest."""
    *older, newest = (f"{major}{minor}" for major, minor in sorted(set(architectures)))
    return (
        *(f"-gencode=arch=compute_{each},code=sm_{each}" for each in older),
        f"-gencode=arch=compute_{newest},code=[sm_{newest},compute_{newest}]",
    )


def architectures_listed(text: str) -> set[Architecture]:
    """Compute capabilities of a list like ``8.0,9.0``, ``80,90`` or torch's ``8.0;9.0+PTX``.

    Raises:
        ValueError: one is no compute capability, or one below the oldest that the kernels run on.
    """
    found = set()
    for architecture in re.split("[,; ]+", text.strip()):
        digits = re.fullmatch(r"(\d{1,2})\.?(\d)(\+PTX)?", architecture)
        if digits is None or (int(digits[1]), int(digits[2])) < OLDEST_ARCHITECTURE:
            oldest = ".".join(map(str, OLDEST_ARCHITECTURE))
            raise ValueError(
                f"compute capabilities: expected {oldest} or higher, got {architecture!r} in {text!r}. "
                "Write them like 8.0,9.0."
            )
        found.add((int(digits[1]), int(digits[2])))
    return found


def name_of(architectures: Iterable[Architecture]) -> str:
    """Like sm_80+sm_90."""
    return "+".join(f"sm_{major}{minor}" for major, minor in sorted(set(architectures)))


def architectures_of(name: str) -> set[Architecture]:
    """Return the architectures of a :func:`name_of`; none for another text."""
    if re.fullmatch(r"sm_\d{2,3}(\+sm_\d{2,3})*", name) is None:
        return set()
    return {(int(digits[:-1]), int(digits[-1])) for digits in re.findall(r"\d+", name)}


def runs_on(built: Iterable[Architecture], gpus: Iterable[Architecture]) -> bool:
    """Return whether machine code for `built` runs on all `gpus`: the same major version, and none newer."""
    code = set(built)
    return all(any(major == gpu[0] and minor <= gpu[1] for major, minor in code) for gpu in gpus)


NVCC_FLAGS: tuple[str, ...] = (*NVCC_COMPILE_FLAGS, *architecture_flags(WHEEL_ARCHITECTURES))

# Checks of arguments that the ops of both modules make.
CUDA_SHARED_SOURCES: tuple[str, ...] = (
    "csrc/ops/attention/attention_arg_checks.cpp",
    "csrc/ops/checks.cpp",
    "csrc/ops/compression/blockwise_arg_checks.cpp",
    "csrc/ops/compression/payload_arg_checks.cpp",
    "csrc/ops/flat/flat_buffer_arg_checks.cpp",
    "csrc/ops/norm/norm_arg_checks.cpp",
    "csrc/ops/optimizers/optimizer_arg_checks.cpp",
)


def sources(root: Path) -> list[str]:
    """C++ files of module ``_C``, relative to the repository root, in a fixed order."""
    found = [path for folder in ("core", "ops") for path in (root / "csrc" / folder).rglob("*.cpp")]
    return sorted(path.relative_to(root).as_posix() for path in found)


def headers(root: Path) -> list[str]:
    """C++ headers that the sources may include, relative to the repository root."""
    found = [path for folder in ("core", "ops") for path in (root / "csrc" / folder).rglob("*.h")]
    return sorted(path.relative_to(root).as_posix() for path in found)


def cuda_sources(root: Path) -> list[str]:
    """Files of module ``_C_cuda``, relative to the repository root, in a fixed order."""
    found = [path for pattern in ("*.cu", "*.cpp") for path in (root / "csrc" / "cuda").rglob(pattern)]
    return sorted([path.relative_to(root).as_posix() for path in found] + list(CUDA_SHARED_SOURCES))


def cuda_headers(root: Path) -> list[str]:
    """Headers that those may include, relative to the repository root."""
    found = [path for pattern in ("*.h", "*.cuh") for path in (root / "csrc" / "cuda").rglob(pattern)]
    return sorted([path.relative_to(root).as_posix() for path in found] + headers(root))


# What the sources need of the host compiler and of the flags beside it.
_PROBE = """
#include <bit>
#include <span>
#if __cplusplus < 202002L
#error -- the host compiler does not support C++20
#endif
"""


@dataclass(frozen=True)
class Nvcc:
    """An nvcc that answered."""

    path: Path
    release: str  # like "13.0"

    @property
    def major(self) -> int:
        return int(self.release.split(".")[0])

    def __str__(self) -> str:
        return f"nvcc {self.release} ({self.path})"


def find_nvcc(cuda: str, torch_version: str) -> Nvcc:
    """Return the nvcc for a torch that was built with `cuda`, like "13.0": one of the same major version.

    ``$CUDA_HOME``, else ``$CUDA_PATH``, names the toolkit; without them PATH, the
    toolkit's wheels and /usr/local/cuda* are searched.

    Raises:
        RuntimeError: there is no nvcc, none that works, or none of that major version.
    """
    refused = []
    for path, release in installed_nvccs(cuda).items():
        if release is None:
            refused.append(f"{path}, which does not say its version")
        elif release.split(".")[0] == cuda.split(".")[0]:
            return Nvcc(path, release)
        else:
            refused.append(f"{path} of CUDA {release}")
    need = f"torch {torch_version} is built for CUDA {cuda}"
    major, minor = cuda.split(".")[:2]
    fix = (
        f"Install the CUDA toolkit {cuda} (like `apt-get install cuda-nvcc-{major}-{minor} "
        f"cuda-cudart-dev-{major}-{minor}` from NVIDIA's repository), or set CUDA_HOME to one"
    )
    if not refused:
        raise RuntimeError(f"nvcc: {need}, and no nvcc was found (looked in {_searched_paths()}). {fix}.")
    raise RuntimeError(
        f"nvcc: expected the major version of CUDA {cuda}, since {need}, got {' and '.join(refused)}. {fix}, "
        "or install a torch for the CUDA version that is there."
    )


def installed_nvccs(cuda: str | None) -> dict[Path, str | None]:
    """Return every nvcc in the searched paths, best first, with its release, or None if it is unknown."""
    found = dict.fromkeys(_candidates(cuda))
    return {path: _release(path) for path in found if os.access(path, os.X_OK) and not path.is_dir()}


def _candidates(cuda: str | None) -> Iterator[Path]:
    """Files that may be the nvcc for torch's CUDA version, in order of preference."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield Path(os.environ[variable]) / "bin" / "nvcc"
            return
    on_path = shutil.which("nvcc")
    if on_path is not None:
        yield Path(on_path)
    if cuda is not None:
        # Where the toolkit's wheels of CUDA 13 and later put it.
        yield Path(sysconfig.get_path("purelib")) / "nvidia" / f"cu{cuda.split('.')[0]}" / "bin" / "nvcc"
    suffixes = ("",) if cuda is None else (f"-{cuda}", f"-{cuda.split('.')[0]}", "")
    yield from (Path(f"/usr/local/cuda{suffix}/bin/nvcc") for suffix in suffixes)


def _searched_paths() -> str:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            return f"${variable}, {os.environ[variable]}/bin"
    return "$CUDA_HOME, $CUDA_PATH, PATH, site-packages/nvidia and /usr/local/cuda*"


def _release(path: Path) -> str | None:
    """Return the release that nvcc names; None when it does not run."""
    try:
        output = subprocess.run(
            [str(path), "--version"], capture_output=True, text=True, check=False, timeout=60
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"release (\d+\.\d+)", output)
    return found[1] if found else None


def toolkit_folder(nvcc: Nvcc) -> Path:
    """Return the folder of nvcc's own include and library folders, which a script on PATH hides."""
    command = [str(nvcc.path), "-dryrun", "-x", "cu", "-c", os.devnull]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    found = re.search(r"^#\$ TOP=(.+)$", output, re.MULTILINE)
    return Path(found[1]).resolve() if found else nvcc.path.resolve().parents[1]


def runtime_library(nvcc: Nvcc) -> Path:
    """Return the toolkit's shared run time, by the name under which torch has loaded its own.

    Raises:
        RuntimeError: the toolkit has none.
    """
    toolkit, name = toolkit_folder(nvcc), f"libcudart.so.{nvcc.major}"
    for folder in (toolkit / "lib64", toolkit / "lib", *sorted(toolkit.glob("targets/*/lib"))):
        if (folder / name).exists():
            return folder / name
    raise RuntimeError(
        f"{nvcc}: its toolkit {toolkit} has no {name}. Install the toolkit's runtime (like "
        f"`apt-get install cuda-cudart-{nvcc.release.replace('.', '-')}`)."
    )


def known_architectures(nvcc: Nvcc) -> set[tuple[int, int]]:
    """Compute capabilities that this nvcc compiles for."""
    command = [str(nvcc.path), "--list-gpu-arch"]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return {(int(major), int(minor)) for major, minor in re.findall(r"compute_(\d+)(\d)\b", output)}


def fitted_architectures(
    nvcc: Nvcc, wanted: Iterable[tuple[int, int]], oldest: tuple[int, int]
) -> set[tuple[int, int]]:
    """`wanted`, and in the place of what is newer than this nvcc the newest that it supports.

    A newer GPU translates that one's PTX.

    Raises:
        RuntimeError: nvcc supports no architecture from `oldest` up to a requested one.
    """
    known = known_architectures(nvcc)
    fitted = set()
    for each in wanted:
        possible = {architecture for architecture in known if oldest <= architecture <= each}
        if not possible:
            raise RuntimeError(
                f"{nvcc}: it compiles for no GPU from compute capability {oldest[0]}.{oldest[1]} to "
                f"{each[0]}.{each[1]}. Install a CUDA toolkit that does."
            )
        fitted.add(max(possible))
    return fitted


def check_host_compiler(nvcc: Nvcc, compiler: str, flags: Iterable[str]) -> None:
    """Let nvcc preprocess two C++20 headers with the host compiler.

    Raises:
        RuntimeError: nvcc refuses the compiler, as it does one newer than itself, or cannot use it.
    """
    with tempfile.TemporaryDirectory(prefix="zero_ext-") as folder:
        probe = Path(folder) / "probe.cu"
        probe.write_text(_PROBE)
        command = [str(nvcc.path), *flags, "-ccbin", compiler, "-E", str(probe), "-o", os.devnull]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode == 0:
        return
    lines = (result.stdout + result.stderr).strip().splitlines()
    errors = [line for line in lines if "error" in line or "fatal" in line] or lines[-1:]
    raise RuntimeError(
        f"{nvcc}: it does not work with the host compiler {_compiler_version(compiler)}: "
        f"{errors[0].strip() if errors else f'exit status {result.returncode}'}. Set CXX to one that it "
        "supports (like CXX=g++-13), or install a CUDA toolkit that supports this one."
    )


def _compiler_version(compiler: str) -> str:
    """Return the compiler's path and the first line that it says of itself."""
    result = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    lines = result.stdout.splitlines()
    return f"{compiler} ({lines[0]})" if lines else compiler
