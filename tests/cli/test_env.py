"""``zero-ext env``: facts that can be checked otherwise, and reasons where there are none."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch

from tests.cli.command import run
from zero_ext import ops
from zero_ext.cli import environment


def facts() -> dict[str, dict[str, str]]:
    return json.loads(run("env", "--json"))


def test_json_holds_what_the_machine_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = facts()
    assert found["versions"]["torch"] == torch.__version__
    assert ("built" in found["versions"]["ops (_C)"]) and "_C" in found["versions"]["ops (_C)"]
    assert found["processor"]["instruction set of the kernels"] == ops.get_isa()
    assert str(os.cpu_count()) in found["processor"]["cores"]
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    expected = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 10} KiB"
    assert found["memory"]["locked memory (ulimit -l)"].startswith(expected)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    assert float(found["memory"]["total"].removesuffix(" GiB")) == pytest.approx(pages, rel=0.01)
    free = float(found[f"folder {tmp_path}"]["free"].removesuffix(" GiB"))
    assert free == pytest.approx(shutil.disk_usage(tmp_path).free / 2**30, abs=1)
    assert list(tmp_path.iterdir()) == []


def test_table_shows_every_fact() -> None:
    output = run("env")
    for section, values in facts().items():
        assert section in output
        assert all(name in output for name in values)


def test_backends_come_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = {"io_uring": "forbidden by this container (errno 1)", "libaio": "", "threads": ""}
    monkeypatch.setattr(ops, "aio_backends", lambda: reasons)
    assert facts()["asynchronous I/O"] == {
        "io_uring": "not available: forbidden by this container (errno 1)",
        "libaio": "available",
        "threads": "available",
    }


def test_a_machine_without_ops_is_described_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler() -> None:
        raise RuntimeError("no C++ compiler was found\nmore lines")

    monkeypatch.setattr(environment, "load", no_compiler)
    monkeypatch.setattr(ops, "get_isa", no_compiler)
    monkeypatch.setattr(ops, "aio_backends", no_compiler)
    monkeypatch.setattr(environment, "NvmeStore", lambda paths: no_compiler())
    found = facts()
    assert found["versions"]["ops (_C)"] == "unknown: no C++ compiler was found"
    assert found["asynchronous I/O"] == {"backends": "unknown: no C++ compiler was found"}
    assert found["processor"]["instruction set of the kernels"].startswith("unknown")
    assert found["memory"]["total"].endswith("GiB")


def test_folders_in_memory_and_without_rights_say_so() -> None:
    assert "memory (tmpfs or ramfs)" in environment.direct_transfers(Path("/dev/shm"))
    assert environment.file_system(Path("/dev/shm")).startswith("tmpfs on ")
    assert environment.file_system(Path("/proc")).startswith("proc on ")
    assert environment.describe_environment(Path("/proc"))["folder /proc"]["O_DIRECT"].startswith("unknown: ")


def test_forbidden_peer_memory_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.peer_memory().startswith(("yes", "no, ranks go through gloo: "))
    # Address 1 is never mapped, so the kernel refuses the read as it does where ptrace is forbidden.
    monkeypatch.setattr(environment, "_OWNER", "import sys; print(1, flush=True); sys.stdin.read()")
    assert environment.peer_memory().startswith("no, ranks go through gloo: ")
    assert ctypes.sizeof(ctypes.c_void_p) == 8
