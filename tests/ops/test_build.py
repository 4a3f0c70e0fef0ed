"""The just-in-time build: cached, locked across processes, and clear when it cannot work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from zero_ext.ops import build, toolchain

ROOT = Path(__file__).resolve().parents[2]

# Builds only the module's entry point: the same steps as the whole extension in a second.
BUILD_ONE_FILE = """
import zero_ext.ops.build as build, zero_ext.ops.toolchain as toolchain
toolchain.sources = lambda root: ["csrc/ops/module.cpp"]
path = build.build()
print(path)
print(build.import_from(path).__name__)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "zero_ext"


def test_processes_that_start_together_build_once(cache: Path) -> None:
    command = [sys.executable, "-c", BUILD_ONE_FILE]
    running = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = [process.communicate() for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], outputs
    paths = {out.splitlines()[0] for out, _ in outputs}
    assert len(paths) == 1 and Path(paths.pop()).is_relative_to(cache)
    assert all(out.splitlines()[1] == "zero_ext._C" for out, _ in outputs)
    assert sum("zero_ext: building" in err for _, err in outputs) == 1
    (folder,) = cache.iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["_C.abi3.so", "lock"]


def test_key_follows_sources_flags_and_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "csrc" / "core").mkdir(parents=True)
    (tmp_path / "csrc" / "ops").mkdir()
    source = tmp_path / "csrc" / "ops" / "one.cpp"
    header = tmp_path / "csrc" / "core" / "one.h"
    keys = set()
    for text in ("int one();", "int two();"):
        source.write_text(text)
        header.write_text("")
        keys.add(build.build_key(tmp_path, ["g++", "-O2"]))
        header.write_text("#pragma once")
        keys.add(build.build_key(tmp_path, ["g++", "-O2"]))
        keys.add(build.build_key(tmp_path, ["g++", "-O3"]))
    monkeypatch.setattr(build.torch, "__version__", "9.9.9")
    keys.add(build.build_key(tmp_path, ["g++", "-O3"]))
    assert len(keys) == 7


def test_every_source_is_compiled() -> None:
    compiled = {ROOT / name for name in toolchain.sources(ROOT)}
    assert compiled == {*(ROOT / "csrc/core").rglob("*.cpp"), *(ROOT / "csrc/ops").rglob("*.cpp")}


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(RuntimeError, match=r"no C\+\+ compiler was found.*apt-get install g\+\+"):
        build.find_compiler()


def test_without_sources_the_error_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "__file__", str(tmp_path / "a" / "b" / "c" / "build.py"))
    with pytest.raises(RuntimeError, match="does not exist; reinstall zero_ext"):
        build.source_root()


def test_a_failed_build_shows_the_compiler_and_leaves_nothing(cache: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    (broken / "csrc" / "ops").mkdir(parents=True)
    (broken / "csrc" / "ops" / "broken.cpp").write_text("this is no C++")
    cache.mkdir()
    target = cache / "_C.abi3.so"
    with pytest.raises(RuntimeError, match=r"building zero_ext\._C failed(.|\n)*broken\.cpp:1"):
        build.compile_module(broken, build.compile_command(broken, build.find_compiler()), target)
    assert list(cache.iterdir()) == []
