"""The compilation of the C++ extension: sources, flags and macros.

Shared by setup.py, which loads this file by its path before the package exists, and by the
just-in-time build. It imports nothing but the standard library.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
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
    "csrc/ops/compression/integer_block_arg_checks.cpp",
    "csrc/ops/compression/payload_arg_checks.cpp",
    "csrc/ops/compression/sign_arg_checks.cpp",
    "csrc/ops/flat/flat_buffer_arg_checks.cpp",
    "csrc/ops/norm/non_finite_arg_checks.cpp",
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
