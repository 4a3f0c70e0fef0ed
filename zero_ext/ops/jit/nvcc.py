"""The nvcc that fits torch: where it is, what it can compile for, and whether its host compiler suits it.

Loaded by its path in setup.py, before the package exists. It imports nothing but the standard library.
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
