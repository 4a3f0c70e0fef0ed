"""Runs cuobjdump, of the CUDA toolkit or of NVIDIA's packages for Python, over object files."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from scripts.cuda_check import sass

ENTRY = re.compile(r"\.entry (\w+)\(.*?\n\.maxntid (\d+)", re.DOTALL)
PACKAGES = "nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"


@dataclass(frozen=True)
class Code:
    """One kernel's machine code for one architecture, and its launch bound."""

    function: sass.Function
    threads: int  # most that a block of it has

    @property
    def traps(self) -> bool:
        """Whether it can end with an error after which all CUDA calls of the process fail."""
        return any(each.name.startswith("BPT.TRAP") for each in self.function.instructions)


def find() -> Path | None:
    """The program, from PATH or as `pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm` puts it."""
    if on_path := shutil.which("cuobjdump"):
        return Path(on_path)
    for folder in map(Path, sys.path):
        for found in sorted(folder.glob("nvidia/cu*/bin/cuobjdump")):
            return found
    return None


def disassemble(program: Path, path: Path) -> dict[tuple[str, str], Code]:
    """The kernels of an object file by their name in it and their architecture.

    Raises:
        RuntimeError: the program failed; its output is in the message.
    """
    bounds = {name: int(threads) for name, threads in ENTRY.findall(_run(program, "--dump-ptx", path))}
    dump = _run(program, "--dump-sass", path)
    return {(each.name, each.architecture): Code(each, bounds[each.name]) for each in sass.functions(dump)}


def _run(program: Path, option: str, path: Path) -> str:
    # It calls nvdisasm, which is installed beside it.
    folders = os.pathsep.join([str(program.parent), os.environ.get("PATH", "")])
    done = subprocess.run(
        [str(program), option, str(path)],
        env={**os.environ, "PATH": folders},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{program} {option} {path} ended with status {done.returncode}:\n{done.stderr}")
    return done.stdout
