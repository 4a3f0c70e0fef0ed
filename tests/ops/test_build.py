"""The just-in-time build of ``_C``: cached, locked across processes, and clear when it cannot work."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.ops.forked import Builder
from zero_ext.ops import build, library, toolchain
from zero_ext.ops.build_cache import CachedModule, build_key

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "zero_ext"


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A source tree of one file, whose text a test may change."""
    for folder in ("core", "ops", "cuda"):
        (tmp_path / "tree" / "csrc" / folder).mkdir(parents=True)
    (tmp_path / "tree" / "csrc" / "ops" / "one.cpp").write_text("int one();")
    return tmp_path / "tree"


def test_processes_that_start_together_build_once(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only the module's entry point: the same steps as the whole extension in half a second.
    monkeypatch.setattr(toolchain, "sources", lambda root: ["csrc/ops/module.cpp"])
    builders = [Builder(tmp_path, build.build_ops) for _ in range(3)]
    ends = [builder.end() for builder in builders]
    assert [status for status, _ in ends] == [0, 0, 0], ends
    ((name, path),) = {builder.loaded() for builder in builders}
    assert name == "zero_ext._C" and path.is_relative_to(cache)
    # Not a terminal: one process says that it starts and that it has ended, the others nothing.
    said = "".join(text for _, text in ends).splitlines()
    assert [re.sub(r"[\d.]+ s$", "N s", line.split(" (")[0]) for line in said] == [
        "zero_ext: building zero_ext._C",
        "zero_ext: built zero_ext._C in N s",
    ]
    (folder,) = cache.iterdir()
    found = sorted(path.name for path in folder.iterdir())
    assert found == ["_C.abi3.so", "_C.abi3.so.sha256", "build.log", "lock"]


def test_key_follows_sources_flags_torch_and_the_kind_of_machine(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = sources / "csrc" / "ops" / "one.cpp"
    header = sources / "csrc" / "core" / "one.h"
    names = ["csrc/ops/one.cpp", "csrc/core/one.h"]
    keys = set()
    for text in ("int one();", "int two();"):
        source.write_text(text)
        header.write_text("")
        keys.add(build_key(sources, names, ["-O2"]))
        header.write_text("#pragma once")
        keys.add(build_key(sources, names, ["-O2"]))
        keys.add(build_key(sources, names, ["-O3"]))
    monkeypatch.setattr(build.torch, "__version__", "9.9.9")
    keys.add(build_key(sources, names, ["-O3"]))
    monkeypatch.setattr("platform.machine", lambda: "riscv128")
    keys.add(build_key(sources, names, ["-O3"]))
    assert len(keys) == 8


def test_every_source_is_compiled() -> None:
    compiled = {ROOT / name for name in toolchain.sources(ROOT)}
    assert compiled == {*(ROOT / "csrc/core").rglob("*.cpp"), *(ROOT / "csrc/ops").rglob("*.cpp")}


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(RuntimeError, match=r"_C is not built and no C\+\+ compiler.*apt-get install g\+\+"):
        build.build_ops()


def test_without_sources_the_error_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "__file__", str(tmp_path / "a" / "b" / "c" / "build.py"))
    with pytest.raises(RuntimeError, match=r"_C is not built and .* does not exist; reinstall zero_ext"):
        build.build_ops()


def test_an_installed_package_finds_its_own_sources(monkeypatch: pytest.MonkeyPatch, sources: Path) -> None:
    monkeypatch.setattr(build, "__file__", str(sources / "ops" / "build.py"))
    assert build.source_root("_C") == sources


def test_a_failed_build_shows_the_compiler_and_leaves_its_log(
    cache: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sources / "csrc" / "ops" / "one.cpp").write_text("this is no C++")
    monkeypatch.setattr(build, "source_root", lambda module: sources)
    with pytest.raises(RuntimeError, match=r"building zero_ext\._C: csrc/ops/one\.cpp failed") as caught:
        build.build_ops()
    (folder,) = cache.iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["build.log", "failed.txt", "lock"]
    log = (folder / "build.log").read_text()
    assert f"whole log: {folder / 'build.log'}" in str(caught.value)
    assert "one.cpp:1" in str(caught.value) and "one.cpp:1" in log and " -O3 " in log
    # Mended, it is built: what failed once is not remembered.
    (sources / "csrc" / "ops" / "one.cpp").write_text((ROOT / "csrc" / "ops" / "module.cpp").read_text())
    module = build.cached_ops()
    assert module.folder != folder
    build.obtain(module, lambda: build.host_recipe(sources))
    assert module.is_complete()


def test_a_torch_older_than_the_stable_abi_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("2.10.1+cu128", "1.13.0"):
        monkeypatch.setattr(library.torch, "__version__", version)
        with pytest.raises(RuntimeError, match=rf"{re.escape(version)} is too old.*torch 2\.11; pip install"):
            library.check_torch()
    for version in ("2.11.0", "2.11.0a0+git12", "3.0"):
        monkeypatch.setattr(library.torch, "__version__", version)
        library.check_torch()


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    pattern = (
        r"_C must be built, but its cache folder .*file/zero_ext/.* cannot be written to: .*XDG_CACHE_HOME"
    )
    with pytest.raises(RuntimeError, match=pattern):
        build.build_ops()


def test_a_folder_of_others_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = CachedModule(tmp_path / "build", "_C")
    with module.locked():
        pass
    module.check_owner()
    module.folder.chmod(0o777)
    with pytest.raises(
        RuntimeError, match=r"with mode 777, and modules are loaded only from .*XDG_CACHE_HOME"
    ):
        module.check_owner()
    facts = os.stat_result((0o755, 0, 0, 1, 1234, 0, 0, 0, 0, 0))
    monkeypatch.setattr(Path, "stat", lambda path: facts)
    monkeypatch.setattr(os, "getuid", lambda: 4321)
    with pytest.raises(RuntimeError, match=r"belongs to user 1234 .*this user \(4321\) or root"):
        module.check_owner()


def test_a_full_disk_is_reported_with_the_way_out(
    cache: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(build, "source_root", lambda module: sources)
    monkeypatch.setattr(build.tempfile, "TemporaryDirectory", full)
    with pytest.raises(RuntimeError, match=r"building zero_ext\._C in .*: .*No space left.*XDG_CACHE_HOME"):
        build.build_ops()


def test_kernels_of_the_installation_that_do_not_load_are_no_error_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = library.why_built_kernels_do_not_load.__wrapped__
    monkeypatch.setattr(library, "CUDA_MODULE", "zero_ext_kernels_of_another_cuda")
    assert reason() == "none came with this installation"
    (tmp_path / "zero_ext_kernels_of_another_cuda.py").write_text(
        "raise ImportError('libcudart.so.12: cannot open shared object file')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert (
        reason()
        == "the one of this installation does not load: libcudart.so.12: cannot open shared object file"
    )
    assert not library.kernels_are_loaded()
