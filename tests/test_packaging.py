"""What setup.py puts into a wheel: all that an installed package needs to compile its CUDA kernels."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from zero_ext.ops.jit import toolchain
from zero_ext_import_hooks import VARIABLE

ROOT = Path(__file__).resolve().parents[1]


def test_a_wheel_holds_what_is_compiled_at_first_use_and_all_it_includes(
    tmp_path: Path,
) -> None:
    library = tmp_path / "library"
    command = ["egg_info", "--egg-base", str(tmp_path), "build_py", "--build-lib", str(library)]
    subprocess.run(
        [sys.executable, "setup.py", "-q", *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        check=True,
    )
    package = library / "zero_ext"
    assert (package / "ops" / "jit" / "jit_build.py").is_file()
    assert (package / "integrations" / "deepspeed" / "names.json").is_file()
    found = {path.relative_to(package).as_posix() for path in (package / "csrc").rglob("*") if path.is_file()}
    assert {
        *toolchain.cuda_sources(ROOT),
        *toolchain.STORAGE_SOURCES,
    } < found and "csrc/core/offload/adam_stream.cpp" not in found
    for name in found:
        assert (package / name).read_bytes() == (ROOT / name).read_bytes()
        for included in re.findall(r'^#include "(.+)"', (package / name).read_text(), re.MULTILINE):
            assert (package / name).parent.joinpath(included).is_file(), f"{name} includes {included}"
    # Where that is a folder whose .pth files Python reads, and nowhere else is zero_ext.
    code = (
        f"import os, site, sys; site.addsitedir({str(library)!r}); "
        "print('zero_ext_import_hooks' in sys.modules)"
    )
    for value, starts in (("", "False"), ("1", "True")):
        command = [sys.executable, "-I", "-S", "-c", code]
        environment = {**os.environ, VARIABLE: value}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == starts


def test_a_source_distribution_holds_all_sources() -> None:
    assert (ROOT / "MANIFEST.in").read_text() == "graft csrc\n"
