"""Passes over a file move every byte; the choice among settings; fio's answers."""

from __future__ import annotations

import json
import secrets
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from zero_ext import ops
from zero_ext.cli.nvme_sweep import (
    Contender,
    Cost,
    DeviceFile,
    FioJob,
    Grid,
    Setting,
    best_of,
    buffer_bytes,
    engine_pass,
    in_turn,
    parse_fio,
    plain_pass,
    run_fio,
)
from zero_ext.plan.parse_sizes import bytes_of, size_text

JOB = FioJob(Path("/data/a:b"), "io_uring", 1 << 20, 32, 1, 1 << 30, writing=True, direct=True)


@pytest.mark.parametrize("direct", [True, False])
def test_every_byte_is_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    monkeypatch.setattr("zero_ext.cli.nvme_sweep._MIN_BUFFER_BYTES", 1 << 16)
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    numbers = torch.Generator().manual_seed(seed)
    setting = Setting("threads", 16384, 4, 2)
    buffer = buffer_bytes(setting) // 4
    assert buffer >= 1 << 16 and 3 * buffer >= setting.in_flight_bytes
    nbytes = 9 * buffer + 3 * 4096  # more buffers than there is memory for, the last one short
    file = DeviceFile(tmp_path / "file", nbytes, direct)
    memory = ops.host_buffer(buffer_bytes(setting))
    memory.random_(generator=numbers)
    file.path.write_bytes(bytes(nbytes))
    cost = engine_pass(file, setting, memory, writing=True)
    assert cost.seconds > 0
    cycle = memory.numpy().tobytes()
    assert file.path.read_bytes() == (cycle * 3)[:nbytes]
    content = secrets.token_bytes(nbytes)
    file.path.write_bytes(content)
    memory.fill_(0xEE)
    engine_pass(file, setting, memory, writing=False)
    last = (
        content[8 * buffer : 9 * buffer],
        content[9 * buffer :] + content[5 * buffer + 3 * 4096 : 6 * buffer],
    )
    assert memory.numpy().tobytes() == last[0] + last[1] + content[6 * buffer : 8 * buffer]


def test_plain_calls_move_every_byte(tmp_path: Path) -> None:
    nbytes = (5 << 20) + 4096
    memory = ops.host_buffer(1 << 20)
    memory.random_()
    for direct in (True, False):
        file = DeviceFile(tmp_path / "file", nbytes, direct)
        file.path.write_bytes(bytes(nbytes))
        plain_pass(file, memory, writing=True)
        assert file.path.read_bytes() == (memory.numpy().tobytes() * 6)[:nbytes]
        plain_pass(file, memory, writing=False)
    with pytest.raises(RuntimeError, match=f"expected {nbytes + 4096} bytes, got {nbytes}"):
        plain_pass(DeviceFile(file.path, nbytes + 4096, False), memory, writing=False)


def contender(name: str, seconds: float, processor: float, depth: int) -> Contender:
    costs = [Cost(seconds * factor, processor) for factor in (9.0, 1.0, 1.0)]  # one slow pass does not count
    return Contender(name, lambda writing: costs[0], Setting("threads", 4096, depth, 1), costs, costs)


def test_the_cheapest_of_the_fastest_is_chosen() -> None:
    slow = contender("slow", 1.05, 0.0, 1)
    fast = contender("fast", 1.0, 0.5, 8)
    cheap = contender("cheap", 1.015, 0.2, 8)
    lean = contender("lean", 1.015, 0.2, 4)
    assert best_of([slow, fast]).name == "fast"
    assert best_of([slow, fast, cheap]).name == "cheap"
    assert best_of([slow, fast, cheap, lean]).name == "lean"


def test_turns_alternate() -> None:
    calls: list[tuple[str, bool]] = []

    def mover(name: str) -> Contender:
        def run(writing: bool) -> Cost:
            calls.append((name, writing))
            return Cost(1.0, 1.0)

        return Contender(name, run)

    both = [mover("a"), mover("b")]
    in_turn(both, 2, lambda name: None)
    assert calls == [(name, writing) for name in "abba" for writing in (True, False)]
    assert [len(each.reads) for each in both] == [len(each.writes) for each in both] == [2, 2]


def test_grids_leave_out_what_cannot_fill_its_queues() -> None:
    grid = Grid(("threads",), (4096, 1 << 20), (2, 8), (1, 2))
    settings, left_out = grid.settings(4 << 20)
    assert len(settings) + len(left_out) == 8
    assert all(setting.in_flight_bytes <= 4 << 20 for setting in settings)
    assert left_out == [Setting("threads", 1 << 20, 8, 1), Setting("threads", 1 << 20, 8, 2)]


def test_sizes_are_written_as_they_are_read() -> None:
    for text in ("4 KiB", "3 MiB", "1 GiB", "5 B", "0 B"):
        assert size_text(bytes_of(text, "--size")) == text


def answer(**changes: object) -> str:
    side = {"io_bytes": 1 << 20, "runtime": 500, "clat_ns": {"percentile": {"99.000000": 3_000_000}}}
    other = {"io_bytes": 0, "runtime": 0}
    job = {"read": side, "write": other, "usr_cpu": 10.0, "sys_cpu": 15.0, "job_runtime": 2000, **changes}
    return json.dumps({"jobs": [job]})


def test_answers_of_fio() -> None:
    result = parse_fio("fio: a warning\n" + answer())
    assert (result.nbytes, result.seconds) == (1 << 20, 0.5)
    assert (result.processor_seconds, result.p99_seconds) == (0.5, 0.003)
    for text in ("", "{}", '{"jobs": []}', answer(read={"io_bytes": 1})):
        with pytest.raises(RuntimeError, match="fio: expected its JSON"):
            parse_fio(text)


def test_calls_of_fio() -> None:
    file = r"--filename=/data/a\:b --rw=write --size=1073741824 --direct=1"
    assert {*file.split(), *["--ioengine=io_uring", "--bs=1048576", "--iodepth=32", "--numjobs=1"]} <= {
        *JOB.command()
    }
    threads = FioJob(JOB.path, "threads", 1 << 20, 32, 2, 1 << 30, writing=False, direct=True).command()
    assert "--iomem_align=2M" in JOB.command()
    assert not any("iomem" in option for option in replace(JOB, huge_pages=False).command())
    # Threads side by side: each 1 MiB behind the last one, with 63 blocks of the others between its own.
    apart = "--numjobs=64 --offset_increment=1048576 --rw=read:66060288 --size=1007681536 --io_size=16777216"
    assert {*apart.split(), "--ioengine=psync", "--iodepth=1"} <= {*threads}
    with pytest.raises(ValueError, match="64 jobs"):
        FioJob(JOB.path, "threads", 1 << 20, 32, 2, 1 << 20, writing=False, direct=True).command()


def test_fio_is_run_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "fio"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\npwd > seen; echo $GLIBC_TUNABLES >> seen\necho '{answer()}'\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    job = FioJob(tmp_path / "file", "libaio", 4096, 1, 1, 1 << 20, writing=False, direct=True)
    assert run_fio(job).nbytes == 1 << 20
    assert (tmp_path / "seen").read_text().split() == [str(tmp_path), "glibc.malloc.hugetlb=1"]
    run_fio(replace(job, huge_pages=False))
    assert (tmp_path / "seen").read_text().split() == [str(tmp_path)]
    program.write_text("#!/bin/sh\necho 'no such engine' >&2\nexit 3\n")
    with pytest.raises(RuntimeError, match=r"exit status 3.*no such engine"):
        run_fio(job)
