"""``zero-ext bench-nvme``: what it measures, writes and refuses, and that its file is gone afterwards."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.cli.command import run
from zero_ext import ops
from zero_ext.cli import nvme_sweep
from zero_ext.cli.console import cleaned_up_when_ended
from zero_ext.cli.nvme_sweep import Cost, DeviceFile, device_file
from zero_ext.config import load_config

SIZES = "--size 4MiB --block-bytes 64KiB,1MiB --queue-depths 2,64 --io-threads 1 --repeats 2"
SMALL = tuple(SIZES.split())


def test_best_section_is_one_that_the_configuration_reads(tmp_path: Path) -> None:
    device, output = tmp_path / "device", tmp_path / "aio.json"
    device.mkdir()
    text = run("bench-nvme", str(device), *SMALL, "--write", str(output))
    section = json.loads(output.read_text())["aio"]
    policy = load_config(output).aio
    assert (policy.backend, policy.block_bytes) == (section["backend"], section["block_bytes"])
    assert policy.block_bytes in (1 << 16, 1 << 20) and policy.queue_depth in (2, 64)
    available = [name for name, reason in ops.aio_backends().items() if not reason]
    assert policy.backend in available
    assert f"{3 * len(available)} settings, each written and read 2 ×:" in text
    assert f"{len(available)} settings left out: they keep more than 4 MiB in flight" in text
    for name in available:
        assert len(re.findall(rf"^│ {name} +│", text, re.MULTILINE)) == 3
    assert re.search(r"^│ pread/pwrite +│.*\b1\.00 │", text, re.MULTILINE)
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert list(device.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["aio.json", "aio.png", "device"]


def test_memory_file_systems_are_measured_and_said() -> None:
    before = set(Path("/dev/shm").iterdir())
    text = run("bench-nvme", "/dev/shm", *SMALL, "--backends", "threads")
    assert "not the device but the page cache was measured" in text
    assert "tmpfs" in text
    assert '{"aio": {"backend": "threads"' in text
    left = {path for path in set(Path("/dev/shm").iterdir()) - before if f"pid{os.getpid()}-" in path.name}
    assert left == set()


@pytest.mark.parametrize(
    ("folder", "named"),
    [
        ("absent", r"nvme path '.*absent': expected a directory, got .* does not exist"),
        ("file", r"nvme path '.*file': expected a directory, got a file"),
        ("/proc", "nvme path '/proc': no directory can be made in it"),
    ],
)
def test_folders_that_cannot_be_measured(tmp_path: Path, folder: str, named: str) -> None:
    (tmp_path / "file").touch()
    text = run("bench-nvme", str(tmp_path / folder), *SMALL, status=1)
    assert re.search(f"error: .*{named}", text.replace("\n", " ")), text
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("arguments", "status", "named"),
    [
        (("--size", "4000000GiB"), 1, r"expected [\d,]+ bytes free and [\d,]+ to spare, got [\d,]+"),
        (("--size", "4194305"), 2, "--size: expected a multiple of 4096 bytes, got 4194305"),
        (
            ("--size", "1MiB", "--block-bytes", "1MiB", "--queue-depths", "2"),
            2,
            "--size: expected at least 2 MiB",
        ),
        (("--block-bytes", "1000"), 2, "aio.block_bytes"),
        (("--queue-depths", "4096"), 2, "aio.queue_depth"),
        (("--queue-depths", "four"), 2, "--queue-depths: expected whole numbers .*, got 'four'"),
        (("--block-bytes", "a lot"), 2, "--block-bytes: expected bytes, got 'a lot'"),
        (("--backends", "posix"), 2, r"--backends: expected some of io_uring.*, got 'posix'"),
        (("--block-bytes", ""), 2, "--block-bytes: expected bytes, got ''"),
        (("--write", "aio.yaml"), 2, r"--write: expected a file name that ends in \.json, got 'aio.yaml'"),
        (("--write", "/absent/aio.json"), 2, "--write: .* in a folder that exists, got '/absent/aio.json'"),
    ],
)
def test_refusals(tmp_path: Path, arguments: tuple[str, ...], status: int, named: str) -> None:
    text = run("bench-nvme", str(tmp_path), *SMALL, *arguments, status=status)
    assert re.search(f"error: .*{named}", text.replace("\n", " ")), text
    assert list(tmp_path.iterdir()) == []


def test_a_backend_that_is_not_available_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ops, "aio_backends", lambda: {"io_uring": "seccomp says no", "threads": ""})
    text = run("bench-nvme", str(tmp_path), *SMALL, "--backends", "io_uring", status=1)
    assert "'io_uring' is not available here: seccomp says no" in text
    text = run("bench-nvme", str(tmp_path), *SMALL, "--repeats", "1")
    assert "io_uring is not available: seccomp says no" in text


def test_a_failed_sweep_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: DeviceFile, *rest: object) -> Cost:
        assert file.path.stat().st_size == 4 << 20
        raise OSError(5, "Input/output error", str(file.path))

    monkeypatch.setattr(nvme_sweep, "engine_pass", fail)
    output = tmp_path / "aio.json"
    output.write_text("kept")
    (tmp_path / "device").mkdir()
    text = run("bench-nvme", str(tmp_path / "device"), *SMALL, "--write", str(output), status=1)
    assert "Input/output error" in text
    assert list((tmp_path / "device").iterdir()) == []
    assert output.read_text() == "kept"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals_leave_nothing(tmp_path: Path, number: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs without
    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)]
    with (
        pytest.raises((SystemExit, KeyboardInterrupt)),
        cleaned_up_when_ended(),
        device_file(tmp_path, 1 << 20) as (file, _),
    ):
        assert file.path.stat().st_blocks * 512 >= 1 << 20
        os.kill(os.getpid(), number)
    assert list(tmp_path.iterdir()) == []
    assert handlers == [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)]
