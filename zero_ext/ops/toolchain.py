"""How the C++ extension is compiled: sources, flags and macros.

Shared by setup.py, which loads this file by its path before the package exists, and by the
just-in-time build. It imports nothing but the standard library.
"""

from __future__ import annotations

from pathlib import Path

# The oldest torch whose stable ABI the extension uses, and the oldest Python (limited API).
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


def sources(root: Path) -> list[str]:
    """C++ files of module ``_C``, relative to the repository root, in a fixed order."""
    found = [path for folder in ("core", "ops") for path in (root / "csrc" / folder).rglob("*.cpp")]
    return sorted(path.relative_to(root).as_posix() for path in found)


def headers(root: Path) -> list[str]:
    """C++ headers that the sources may include, relative to the repository root."""
    found = [path for folder in ("core", "ops") for path in (root / "csrc" / folder).rglob("*.h")]
    return sorted(path.relative_to(root).as_posix() for path in found)
