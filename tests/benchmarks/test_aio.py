"""The benchmark of asynchronous I/O: its verdicts, and that its contenders move what they say."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch

from benchmarks import aio
from benchmarks.peers import storage_engines, tensor_storage
from benchmarks.peers.storage_engines import Mover, block_latencies, percentile_99
from zero_ext import ops
from zero_ext.cli.nvme_sweep import Cost, DeviceFile, Setting

SETTING = Setting("threads", 8192, 4, 1)
SIZES = (8192, 4096, 3 * 8192, 4096) * 5


def test_percentile_is_the_one_of_numpy() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for count in (1, 2, 99, 100, 101, 1000):
        values = [draw.random() for _ in range(count)]
        assert percentile_99(values) == numpy.percentile(values, 99, method="inverted_cdf")
    with pytest.raises(ValueError):
        percentile_99([])


def mover(name: str, backend: str, seconds: float) -> Mover:
    return Mover(name, lambda writing: (Cost(seconds, 0.1), 0.002), backend)


def test_engines_are_judged_against_the_same_engine() -> None:
    contenders = [
        mover("pread/pwrite, one thread", "", 1.0),
        mover("zero_ext, io_uring", "io_uring", 1.0),
        mover("fio, io_uring", "io_uring", 0.96),
        mover("zero_ext, libaio", "libaio", 2.0),
        mover("fio, libaio", "libaio", 1.8),
        mover("DeepSpeed, aio handle", "libaio", 2.1),
    ]
    pairs = aio.pairs_of(contenders)
    assert [[each.name.split(",")[0] for each in pair] for pair in pairs] == [
        ["pread/pwrite"],
        ["zero_ext", "fio"],
        ["zero_ext", "fio"],
        ["zero_ext", "DeepSpeed"],
    ]
    for number in range(3):
        for pair in pairs:
            aio.turn_beside(aio.alternate(pair, number), pair[-1], writing=False)
    table, figures = aio.judge_engines(contenders, 10**9, writing=False)
    assert [row["met"] for row in figures] == [None, None, True, None, False, True]
    assert [row["bar"] for row in figures] == [None, None, 0.95, None, 0.95, 1.0]
    assert figures[4]["zero_ext_against_it"] == pytest.approx(0.9)
    assert figures[3]["gigabytes_per_second"] == pytest.approx(0.5)
    assert [row[-1] for row in table.rows] == ["", "", "yes", "", "no", "yes"]
    assert table.rows[4][1:4] == ["0.56", "0.100", "2.0"]


def storages_of(arena_seconds: float, files_seconds: float) -> list[aio.Passes]:
    storages = [aio.Passes("arena in a file", aio.arena), aio.Passes("file per tensor", aio.file_per_tensor)]
    for storage, seconds in zip(storages, (arena_seconds, files_seconds), strict=True):
        storage.setups = [0.5]
        for figures in (storage.seconds, storage.processor, storage.p99):
            for name, _ in aio.PASSES:
                figures[name] = [seconds, 3 * seconds, seconds]
    return storages


@pytest.mark.parametrize(("arena_seconds", "met"), [(1.0, True), (1.04, True), (1.1, False)])
def test_the_arena_is_judged_against_files(arena_seconds: float, met: bool) -> None:
    table, figures = aio.judge_storages(storages_of(arena_seconds, 1.0), 0)
    assert [row["met"] for row in figures] == [None, met] * 4
    assert {row["setup_seconds"] for row in figures} == {0.5}
    assert len(table.rows) == 8 and all(len(row) == len(table.columns) for row in table.rows)


def storages() -> Iterator[object]:
    yield tensor_storage.arena
    yield tensor_storage.file_per_tensor
    if not tensor_storage.why_no_loop_device():
        yield tensor_storage.block_device


@pytest.mark.parametrize("make", list(storages()))
def test_tensors_come_back_from_every_storage(make: aio.Passes, tmp_path: Path) -> None:
    with make(tmp_path, SIZES, SETTING) as storage:  # type: ignore[operator]
        written = []
        for number, size in enumerate(SIZES):
            tensor = ops.host_buffer(size).random_()
            written.append(tensor)
            storage.start(number, tensor, True)()
        for number, tensor in enumerate(written):
            target = ops.host_buffer(tensor.numel()).fill_(0xEE)
            storage.start(number, target, False)()
            assert torch.equal(target, tensor)
        memory = ops.host_buffer(aio.WINDOW * max(SIZES))
        assert len(aio.run_pass(storage, memory, SIZES, writing=False)) == len(SIZES)
        last = len(SIZES) - 1
        begin = last % aio.WINDOW * max(SIZES)
        assert torch.equal(memory[begin : begin + SIZES[last]], written[last])
    assert list(tmp_path.iterdir()) == []


def test_latencies_are_those_of_every_block(tmp_path: Path) -> None:
    file = DeviceFile(tmp_path / "file", 10 * 8192, True)
    file.path.write_bytes(bytes(file.nbytes))
    memory = ops.host_buffer(4 * 8192).fill_(7)
    assert len(block_latencies(file, SETTING, memory, writing=True)) == 10
    assert file.path.read_bytes() == b"\7" * file.nbytes


def test_a_short_run_names_who_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot_build() -> None:
        raise RuntimeError("needs libaio-dev:\n libaio.h")

    monkeypatch.setattr(aio, "load_async_io", cannot_build)
    monkeypatch.setattr(aio, "fio_installed", lambda: False)
    monkeypatch.setattr(aio, "BLOCK", 1 << 16)
    monkeypatch.setattr(aio, "LAYER", SIZES)
    missing: list[str] = []
    contenders = aio.measure_engines(tmp_path, 4 << 20, 1, missing)
    available = [name for name, reason in ops.aio_backends().items() if not reason]
    assert [each.name for each in contenders[1:]] == [f"zero_ext, {name}" for name in available]
    assert all(len(each.costs[writing]) == 1 for each in contenders for writing in (True, False))
    assert "DeepSpeed's aio handle: needs libaio-dev: libaio.h" in missing
    assert all(len(each.p99[True]) == 1 for each in contenders[1:])
    assert any(line.startswith("fio: not installed") for line in missing)
    passes = aio.measure_storages(tmp_path, 1, 2, missing)
    assert [len(each.setups) for each in passes] == [2] * len(passes)
    aio.judge_storages(passes, 1)
    assert list(tmp_path.iterdir()) == []
    assert storage_engines.HANDLE != tensor_storage.HANDLE
