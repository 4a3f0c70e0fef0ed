"""Builds the stand-in's C++ once for a torch version and a state of its sources."""

from __future__ import annotations

import fcntl
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "csrc"
CACHE = Path(__file__).resolve().parents[2] / "build" / "stand_in"
FLAGS = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Wno-unused-parameter"]


def library() -> Path:
    """Path of the built library; whoever comes first builds it and the others wait."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for source in sorted(_with_included(SOURCES.iterdir())):
        digest.update(source.name.encode() + source.read_bytes())
    folder = CACHE / f"{torch.__version__}-{digest.hexdigest()[:16]}"
    built = folder / "stand_in.so"
    folder.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            _build(folder)
    return built


def _with_included(files: Iterable[Path]) -> set[Path]:
    """These files and all of the repository that they include, directly or not."""
    found: set[Path] = set()
    waiting = [path.resolve() for path in files]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            names = re.findall(r'^#include "(.+)"$', path.read_text(), re.MULTILINE)
            waiting += [(path.parent / name).resolve() for name in names]
    return found


def _build(folder: Path) -> None:
    from torch.utils.cpp_extension import load

    # Left by a build that was killed; torch would wait for its end for ever. Whoever builds now is alone
    # here.
    (folder / "lock").unlink(missing_ok=True)
    # One translation unit, because torch's headers cost more than all that is compiled after them.
    unit = folder / "unit.cpp"
    unit.write_text("".join(f'#include "{source}"\n' for source in sorted(SOURCES.glob("*.cpp"))))
    load(
        "stand_in",
        str(unit),
        extra_cflags=FLAGS,
        build_directory=str(folder),
        is_python_module=False,
    )
