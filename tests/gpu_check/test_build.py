"""Which built modules are used as they are, and which are built again."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from unittest import mock

import pytest

from scripts.gpu_check import build

NEED = {"sources": "abc", "torch": "2.11.0", "cuda": "13.0", "capabilities": ["9.0"]}


def carried(folder: Path, **changed: object) -> Path:
    """Modules of a few bytes and their record, which differs from what they are by `changed`."""
    paths = [build.module_path(folder, name) for name in build.MODULES]
    for path in paths:
        path.write_bytes(path.name.encode())
    record = {**NEED, "modules": build.digest(paths), **changed}
    (folder / build.RECORD).write_text(json.dumps(record))
    return folder


def test_modules_that_fit_are_used(tmp_path: Path) -> None:
    assert build.why_not(carried(tmp_path), NEED) == ""


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"torch": "2.10.0"}, "torch: built for '2.10.0', needed '2.11.0'"),
        ({"capabilities": ["8.0"]}, "capabilities: built for ['8.0'], needed ['9.0']"),
        ({"sources": "older"}, "sources: built for 'older'"),
        ({"modules": "of others"}, "modules: built for 'of others'"),
    ],
)
def test_others_are_not_and_the_reason_is_reported(
    tmp_path: Path, changed: dict[str, object], reason: str
) -> None:
    assert reason in build.why_not(carried(tmp_path, **changed), NEED)


def test_a_missing_file_or_a_broken_record_is_reported(tmp_path: Path) -> None:
    assert "there is no _C.abi3.so, _C_cuda.abi3.so, modules.json" in build.why_not(tmp_path, NEED)
    carried(tmp_path)
    for text, reason in (("{", "cannot be read"), ("[]", "holds no object")):
        (tmp_path / build.RECORD).write_text(text)
        assert reason in build.why_not(tmp_path, NEED)


def test_every_source_counts(tmp_path: Path) -> None:
    names = {path.relative_to(build.ROOT).as_posix() for path in build.sources(build.ROOT)}
    assert {
        "csrc/cuda/optimizers/adam_8bit.cu",
        "csrc/core/optimizers/adam_rule.h",
        "setup.py",
        "zero_ext/ops/jit/toolchain.py",
    } <= names
    for name in ("csrc/cuda", "zero_ext/ops/jit"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("csrc/cuda/a.cu", "setup.py", "zero_ext/ops/jit/toolchain.py"):
        (tmp_path / name).write_text("1")
    before = build.digest(build.sources(tmp_path))
    (tmp_path / "csrc/cuda/a.cu").write_text("2")
    assert build.digest(build.sources(tmp_path)) != before


def test_a_build_is_recorded_and_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(build.ROOT / "zero_ext" / "ops", tmp_path / "zero_ext" / "ops")
    shutil.copy(build.ROOT / "setup.py", tmp_path)
    keep = tmp_path / "kept"
    keep.mkdir()
    built: list[list[str]] = []

    def compile_(root: Path, targets: list[str]) -> None:
        built.append(targets)
        for name in build.MODULES:
            build.module_path(root / "zero_ext", name).write_bytes(b"machine code")

    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(build, "capabilities", lambda: ["9.0"])
    monkeypatch.setattr(build, "build", compile_)
    monkeypatch.setattr(build, "load", lambda package: None)
    with mock.patch("sys.argv", ["build", "--keep", str(keep)]):
        assert build.main() == 0
        assert build.main() == 0
    assert built == [["9.0"]]
    output = capsys.readouterr().out
    assert "because there is no _C.abi3.so" in output and "for 9.0: the ones that were there fit" in output
    assert sorted(path.name for path in keep.iterdir()) == ["_C.abi3.so", "_C_cuda.abi3.so", "modules.json"]


def test_a_failed_build_leaves_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(build.ROOT / "zero_ext" / "ops", tmp_path / "zero_ext" / "ops")
    shutil.copy(build.ROOT / "setup.py", tmp_path)
    carried(tmp_path / "zero_ext")

    def fails(root: Path, targets: list[str]) -> None:
        raise subprocess.CalledProcessError(1, ["setup.py"])

    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(build, "build", fails)
    with mock.patch("sys.argv", ["build"]):
        assert build.main() == 1
    assert not (tmp_path / "zero_ext" / build.RECORD).exists()
