"""Builds the extension just in time, once per torch version and state of the sources.

The result lies in the user's cache folder (``$XDG_CACHE_HOME/zero_ext``, by default
``~/.cache/zero_ext``). Ranks that start together wait for one another on a file lock, so only the
first one compiles.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch
from torch.utils.cpp_extension import include_paths, library_paths

from zero_ext.ops import toolchain

MODULE = "_C"


def source_root() -> Path:
    """The repository root that holds ``csrc``.

    Raises:
        RuntimeError: the package was installed without its sources.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / "csrc" / "ops").is_dir():
        raise RuntimeError(
            f"zero_ext._C is not built and {root / 'csrc'} does not exist; reinstall zero_ext from a wheel "
            "or from a complete source tree"
        )
    return root


def find_compiler() -> str:
    """Path of the C++ compiler: ``$CXX``, else ``c++``, ``g++`` or ``clang++``.

    Raises:
        RuntimeError: none of them is installed.
    """
    candidates = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    for candidate in filter(None, candidates):
        path = shutil.which(candidate)
        if path is not None:
            return path
    raise RuntimeError(
        "zero_ext._C is not built and no C++ compiler was found (tried $CXX, c++, g++, clang++); "
        "install one, for example: apt-get install g++"
    )


def compile_command(root: Path, compiler: str) -> list[str]:
    """Compiler call up to, not including, the source and the object file."""
    includes = [*include_paths(), sysconfig.get_path("include")]
    return [
        compiler,
        *toolchain.COMPILE_FLAGS,
        f"-ffile-prefix-map={root}/=",
        *(f"-D{name}={value}" for name, value in toolchain.DEFINES),
        *(flag for path in includes for flag in ("-isystem", str(path))),
    ]


def build_key(root: Path, command: list[str]) -> str:
    """Hash of everything the built module depends on: torch, the compiler call, every source."""
    digest = hashlib.sha256()
    digest.update("\0".join([torch.__version__, *command]).encode())
    for name in [*toolchain.sources(root), *toolchain.headers(root)]:
        digest.update(f"\0{name}\0".encode())
        digest.update((root / name).read_bytes())
    return digest.hexdigest()[:16]


def cache_folder() -> Path:
    """Folder of all just-in-time builds."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "zero_ext"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on `path`; the kernel drops it when the holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run(command: list[str], root: Path) -> None:
    """Runs one compiler call; its whole output is in the error when it fails."""
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(
            f"building zero_ext._C failed (exit status {result.returncode}): {' '.join(command)}\n"
            f"{result.stdout}{result.stderr}"
        )


def compile_module(root: Path, command: list[str], target: Path) -> None:
    """Compiles all sources in parallel and links them to `target`, which appears complete or not at all."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        names = toolchain.sources(root)
        objects = [str(Path(folder) / f"{index}.o") for index in range(len(names))]
        calls = [[*command, "-c", name, "-o", output] for name, output in zip(names, objects, strict=True)]
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            list(pool.map(lambda call: run(call, root), calls))
        linked = Path(folder) / target.name
        folders = library_paths()
        run(
            [
                command[0],
                "-shared",
                *objects,
                *(f"-L{path}" for path in folders),
                *(f"-Wl,-rpath,{path}" for path in folders),
                "-ltorch_cpu",
                "-o",
                str(linked),
            ],
            root,
        )
        linked.replace(target)


def build() -> Path:
    """Path of the module built from this source tree, compiled first when it is not in the cache.

    Raises:
        RuntimeError: no sources, no compiler, or the compiler refused the sources.
    """
    root = source_root()
    command = compile_command(root, find_compiler())
    folder = cache_folder() / f"{MODULE}-{build_key(root, command)}"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{MODULE}.abi3.so"
    with locked(folder / "lock"):
        if not target.exists():
            print(f"zero_ext: building {target} (once for this torch and these sources)", file=sys.stderr)
            compile_module(root, command, target)
    return target


def import_from(path: Path) -> ModuleType:
    """Imports the module file at `path` as ``zero_ext._C``."""
    name = f"zero_ext.{MODULE}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise RuntimeError(f"cannot import {path}; delete it to have it built again")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = module
    return module
