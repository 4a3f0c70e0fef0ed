"""The just-in-time build of ``_C``: cached, locked across processes, and clear when it cannot work."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest

from tests.ops.forked import Builder
from zero_ext.ops import load_library
from zero_ext.ops.jit import build_cache, jit_build, toolchain
from zero_ext.ops.jit.build_cache import CachedModule, build_key

ROOT = Path(__file__).resolve().parents[3]


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


def test_processes_that_start_simultaneously_build_once(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only the module's entry point: the same steps as the whole extension in half a second.
    monkeypatch.setattr(toolchain, "sources", lambda root: ["csrc/ops/cpu_module.cpp"])
    builders = [Builder(tmp_path, jit_build.build_ops) for _ in range(3)]
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
    monkeypatch.setattr(jit_build.torch, "__version__", "9.9.9")
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
    with pytest.raises(
        RuntimeError, match=r"_C: it is not built, and no C\+\+ compiler.*apt-get install g\+\+"
    ):
        jit_build.build_ops()


def test_without_sources_the_error_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(jit_build, "__file__", str(tmp_path / "a" / "b" / "c" / "d" / "jit_build.py"))
    with pytest.raises(RuntimeError, match=r"_C: it is not built, and .* does not exist. Install zero_ext"):
        jit_build.build_ops()


def test_an_installed_package_finds_its_own_sources(monkeypatch: pytest.MonkeyPatch, sources: Path) -> None:
    monkeypatch.setattr(jit_build, "__file__", str(sources / "ops" / "jit" / "jit_build.py"))
    assert jit_build.source_root("_C") == sources


def test_a_failed_build_shows_the_compiler_and_leaves_its_log(
    cache: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sources / "csrc" / "ops" / "one.cpp").write_text("this is no C++")
    monkeypatch.setattr(jit_build, "source_root", lambda module: sources)
    with pytest.raises(RuntimeError, match=r"building zero_ext\._C: csrc/ops/one\.cpp: it failed") as caught:
        jit_build.build_ops()
    (folder,) = cache.iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["build.log", "failed.txt", "lock"]
    log = (folder / "build.log").read_text()
    assert f"See the full log: {folder / 'build.log'}" in str(caught.value)
    assert "one.cpp:1" in str(caught.value) and "one.cpp:1" in log and " -O3 " in log
    # Mended, it is built: what failed once is not remembered.
    (sources / "csrc" / "ops" / "one.cpp").write_text((ROOT / "csrc" / "ops" / "cpu_module.cpp").read_text())
    module = jit_build.cached_ops()
    assert module.folder != folder
    jit_build.obtain(module, lambda: jit_build.host_recipe(sources))
    assert module.is_complete()


def test_a_torch_older_than_the_stable_abi_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("2.10.1+cu128", "1.13.0"):
        monkeypatch.setattr(load_library.torch, "__version__", version)
        with pytest.raises(
            RuntimeError, match=rf"torch: expected at least 2\.11.*, got {re.escape(version)}.*pip install"
        ):
            load_library.check_torch()
    for version in ("2.11.0", "2.11.0a0+git12", "3.0"):
        monkeypatch.setattr(load_library.torch, "__version__", version)
        load_library.check_torch()


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    pattern = r"_C: .* its cache folder .*file/zero_ext/.* cannot be written to: .*XDG_CACHE_HOME"
    with pytest.raises(RuntimeError, match=pattern):
        jit_build.build_ops()


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of private builds, of a temporary folder like ``/tmp``."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    monkeypatch.setattr(build_cache.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    build_cache._log_private_folder.cache_clear()
    return tmp_path / "tmp" / f"zero_ext-{os.getuid()}"


def belongs_to(monkeypatch: pytest.MonkeyPatch, owners: dict[Path, int]) -> None:
    """Lets these paths belong to other users."""
    real_lstat = Path.lstat

    def lstat(path: Path) -> os.stat_result:
        facts = real_lstat(path)
        return os.stat_result((*facts[:4], owners.get(path, facts.st_uid), *facts[5:]))

    monkeypatch.setattr(Path, "lstat", lstat)


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757, 0o1777])
@pytest.mark.parametrize("below", [".", "zero_ext", "zero_ext/build"])
def test_a_folder_that_others_can_write_to_is_replaced_by_a_private_one(
    tmp_path: Path,
    private: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    mode: int,
    below: str,
) -> None:
    base = tmp_path / "caches"
    monkeypatch.setenv("XDG_CACHE_HOME", str(base))
    (base / "zero_ext" / "build").mkdir(parents=True)
    shared = (base / below).resolve()
    shared.chmod(mode)
    module = CachedModule(build_cache.cache_folder() / "build", "_C")
    if mode == 0o1777 and below == ".":
        # As in /tmp: what this user owns there, others cannot replace.
        assert module.folder == base / "zero_ext" / "build"
        return
    assert module.folder == private / "build"
    assert f"{shared}: expected no write permission for group and others, got mode {mode:o}. " in (
        capsys.readouterr().err
    )
    with module.locked():
        assert (private / "build" / "lock").is_file()
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert not list((base / "zero_ext" / "build").iterdir())
    shared.chmod(0o755)
    assert CachedModule(base / "zero_ext" / "build", "_C").folder == base / "zero_ext" / "build"


def test_a_folder_of_another_user_is_replaced_and_one_of_root_is_not(
    tmp_path: Path, private: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "caches"
    base.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(base))
    for owner, expected in ((os.getuid() + 1234, private), (0, base / "zero_ext")):
        with monkeypatch.context() as patch:
            belongs_to(patch, {base: owner})
            assert build_cache.cache_folder() == expected
    assert f"{base}: expected it to belong to user {os.getuid()} or root, got" in capsys.readouterr().err
    # A link that another user can point elsewhere is as good as a folder of that user.
    link = tmp_path / "link"
    link.symlink_to(base)
    monkeypatch.setenv("XDG_CACHE_HOME", str(link))
    assert build_cache.cache_folder() == link / "zero_ext"
    belongs_to(monkeypatch, {link: os.getuid() + 1234})
    assert build_cache.cache_folder() == private


def test_parents_of_the_user_folder_are_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user_folder = tmp_path / "open" / "home"
    (user_folder / ".cache").mkdir(parents=True)
    user_folder.parent.chmod(0o777)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: user_folder)
    assert build_cache.cache_folder() == user_folder / ".cache" / "zero_ext"
    user_folder.chmod(0o775)
    assert build_cache.distrust(build_cache.cache_folder()) is None
    assert build_cache.cache_folder() != user_folder / ".cache" / "zero_ext"


def test_a_user_without_a_user_folder_needs_only_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert build_cache.cache_folder() == tmp_path / "zero_ext"


def test_below_a_device_there_is_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert build_cache.cache_folder() == Path("/dev/null/zero_ext")
    assert not CachedModule(build_cache.cache_folder(), "_C").is_complete()


def test_a_private_folder_that_another_user_has_made_is_refused(
    tmp_path: Path, private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "open"))
    private.mkdir()
    belongs_to(monkeypatch, {private: os.getuid() + 1234})
    with pytest.raises(RuntimeError, match=rf"{private}: expected it to belong to .*set XDG_CACHE_HOME"):
        build_cache.cache_folder()


def test_a_module_that_others_can_write_to_is_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = CachedModule(tmp_path / "zero_ext" / "build", "_C")
    before = os.umask(0o002)
    try:
        with module.locked():
            built = module.folder / "built.so"
            built.write_bytes(b"code")
            module.put(built)
    finally:
        os.umask(before)
    assert module.is_complete()
    assert stat.S_IMODE(module.folder.parent.stat().st_mode) == 0o755
    checksum = module.path.with_name(f"{module.path.name}.sha256")
    for path in (module.path, checksum):
        path.chmod(0o664)
        assert not module.is_complete()
        path.chmod(0o644)
        assert module.is_complete()
        with monkeypatch.context() as patch:
            belongs_to(patch, {path: os.getuid() + 1234})
            assert not module.is_complete()
    module.folder.chmod(0o775)
    with pytest.raises(RuntimeError, match=r"got mode 775\. Remove the write permission, or set XDG_CACHE"):
        module.is_complete()


def test_a_full_disk_is_reported_with_a_fix(
    cache: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(jit_build, "source_root", lambda module: sources)
    monkeypatch.setattr(jit_build.tempfile, "TemporaryDirectory", full)
    with pytest.raises(RuntimeError, match=r"building zero_ext\._C: .*No space left.*XDG_CACHE_HOME"):
        jit_build.build_ops()


def test_kernels_of_the_installation_that_do_not_load_are_no_error_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = load_library.why_built_kernels_do_not_load.__wrapped__
    monkeypatch.setattr(load_library, "CUDA_MODULE", "zero_ext_kernels_of_another_cuda")
    assert reason() == "none came with this installation"
    (tmp_path / "zero_ext_kernels_of_another_cuda.py").write_text(
        "raise ImportError('libcudart.so.12: cannot open shared object file')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert (
        reason()
        == "the one of this installation does not load: libcudart.so.12: cannot open shared object file"
    )
    assert not load_library.kernels_are_loaded()
