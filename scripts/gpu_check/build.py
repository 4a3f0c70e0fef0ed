"""Builds zero_ext's modules in place for the GPUs that are present, unless built ones that fit lie there.

python -m scripts.gpu_check.build [--keep FOLDER]

A build takes minutes of a GPU machine's time, so its modules can be carried to the next one: with
`modules.json`, which says what they were built from and for, they are used where all of that is the same.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import torch

ROOT = Path(__file__).resolve().parents[2]
RECORD = "modules.json"
MODULES = ("_C", "_C_cuda")


def module_path(package: Path, name: str) -> Path:
    """Where a module lies once it is built."""
    return package / f"{name}.abi3.so"


def digest(paths: Sequence[Path]) -> str:
    """SHA-256 over names and contents."""
    found = hashlib.sha256()
    for path in sorted(paths):
        found.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


def sources(root: Path) -> list[Path]:
    """All files that a module depends on."""
    code = [path for path in (root / "csrc").rglob("*") if path.suffix in {".cpp", ".cu", ".cuh", ".h"}]
    return [*code, root / "setup.py", root / "zero_ext" / "ops" / "jit" / "toolchain.py"]


def capabilities() -> list[str]:
    """The compute capabilities of the GPUs here, like "9.0"."""
    devices = range(torch.cuda.device_count())
    return sorted({"{}.{}".format(*torch.cuda.get_device_capability(device)) for device in devices})


def wanted(root: Path) -> dict[str, object]:
    """What modules must have been built from and for, to be used here."""
    return {
        "sources": digest(sources(root)),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "capabilities": capabilities(),
    }


def why_not(package: Path, need: Mapping[str, object]) -> str:
    """Why the modules in `package` cannot be used here; empty if they can."""
    paths = [module_path(package, name) for name in MODULES]
    absent = [path.name for path in (*paths, package / RECORD) if not path.is_file()]
    if absent:
        return f"there is no {', '.join(absent)}"
    try:
        record = json.loads((package / RECORD).read_text())
    except ValueError as error:
        return f"{RECORD} cannot be read: {error}"
    if not isinstance(record, dict):
        return f"{RECORD} holds no object"
    for name, value in {**need, "modules": digest(paths)}.items():
        if record.get(name) != value:
            return f"{name}: built for {record.get(name)!r}, needed {value!r}"
    return ""


def load(package: Path) -> None:
    """Loads both modules without the package, whose own needs may be missing here.

    Raises:
        ImportError: a module does not load.
    """
    for name in MODULES:
        path = str(module_path(package, name))
        loader = importlib.machinery.ExtensionFileLoader(f"zero_ext.{name}", path)
        spec = importlib.util.spec_from_file_location(f"zero_ext.{name}", path, loader=loader)
        if spec is None:
            raise ImportError(f"{path} is no module")
        module: ModuleType = importlib.util.module_from_spec(spec)
        loader.exec_module(module)


def build(root: Path, targets: Sequence[str]) -> None:
    """Compiles both modules in place.

    Raises:
        subprocess.CalledProcessError: it failed; what the compilers said was printed.
    """
    environment = {**os.environ, "TORCH_CUDA_ARCH_LIST": ";".join(targets)}
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    subprocess.run(command, cwd=root, env=environment, check=True)


def main() -> int:
    """Exit status 1 if there are no modules that load in the end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--keep", type=Path, help="folder for copies of the modules, to carry elsewhere")
    keep = parser.parse_args().keep
    package, need = ROOT / "zero_ext", wanted(ROOT)
    reason, began = why_not(package, need), time.monotonic()
    if reason:
        print(f"building, as {reason}", flush=True)
        (package / RECORD).unlink(missing_ok=True)
        try:
            build(ROOT, capabilities())
        except subprocess.CalledProcessError as error:
            print(f"the build failed with exit status {error.returncode}", file=sys.stderr)
            return 1
        paths = [module_path(package, name) for name in MODULES]
        (package / RECORD).write_text(json.dumps({**need, "modules": digest(paths)}, indent=1) + "\n")
    load(package)
    if keep is not None:
        for path in (package / RECORD, *(module_path(package, name) for name in MODULES)):
            shutil.copy2(path, keep / path.name)
    how = (
        f"built in {time.monotonic() - began:.0f} s, because {reason}"
        if reason
        else "the ones that were there fit"
    )
    print(f"for {', '.join(capabilities())}: {how}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
