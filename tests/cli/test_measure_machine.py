"""``zero-ext env --measure``: figures that can be, and that ``plan`` takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.cli.command import run
from zero_ext.cli import measure_machine
from zero_ext.plan.simulation import Hardware

SMALL = measure_machine.Scale(memory=8 << 20, file=48 << 20, exchanged=4 << 20, product=128)
RATES = ("device_bandwidth", "host_bandwidth", "to_host", "nvme_read", "nvme_write", "intra_bandwidth")
CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Little to measure, in one thread: others wait for each other where tests run side by side."""
    threads, measure = torch.get_num_threads(), measure_machine.measure_machine

    def quick(name, ranks, folder, scale=SMALL, tick=print):
        return measure(name, ranks, folder, scale, tick)

    monkeypatch.setattr(measure_machine, "measure_machine", quick)
    monkeypatch.setattr(measure_machine, "_BUDGET_SECONDS", 0.05)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_measured_machine_is_planned_for(small: None, tmp_path: Path) -> None:
    path = tmp_path / "cellar.json"
    text = run("env", "--measure", str(path), "--ranks", "2", "--nvme-path", str(tmp_path))
    for word in ("matmul_flops", "TFLOP/s", "nvme_read", "collectives of 2 ranks"):
        assert word in text
    machine = Hardware.load(path)
    assert (machine.name, machine.ranks_per_node) == ("cellar", 2)
    assert machine.device_is_host == (not torch.accelerator.is_available())
    for rate in RATES:
        assert 1e5 < getattr(machine, rate) < 1e14, rate
    assert 1e7 < machine.matmul_flops < 1e16
    assert 1e-7 < machine.unit_seconds < 10
    assert 1e-6 < machine.collective_seconds < 10
    assert machine.nvme_bytes > 10**6
    assert list(tmp_path.iterdir()) == [path]  # the file that was measured is gone
    assert "cellar" in run("plan", "1M", "--gpus", "2", "--seq", "64", "--machine", str(path))


def test_without_a_folder_there_is_no_nvme(small: None, tmp_path: Path) -> None:
    text = run("env", "--measure", str(tmp_path / "m.json"), "--ranks", "1", "--json")
    found = json.loads(text[text.index("{") :])
    assert found["nvme_bytes"] == 1
    assert found["collective_seconds"] == 0


def test_passes_that_something_else_held_up_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    waits = iter([9.0, 0.2, 0.3, 0.4, 0.5, 7.0])
    monkeypatch.setattr(measure_machine.time, "perf_counter", lambda: now[0])

    def run_once() -> None:
        now[0] += next(waits)

    assert measure_machine._seconds(CPU, run_once) == pytest.approx(0.3)


def test_rates_are_work_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_machine, "_seconds", lambda device, run: (run(), 2.0)[1])
    assert measure_machine.product_rate(CPU, 100) == 2 * 100**3 / 2
    assert measure_machine.copy_rate(CPU, CPU, 4096) == 4096 / 2
    # 12 bytes of state read and written, gradient and parameter of 2 bytes each.
    assert measure_machine.update_rate(12_000) == 1000 * 28 / 2


@pytest.mark.parametrize("path", ["machine.txt", "/no/such/folder/machine.json"])
def test_an_output_path_that_plan_cannot_read_is_refused(path: str) -> None:
    assert "ending in .json" in run("env", "--measure", path, status=2)


def test_failed_ranks_are_reported(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_machine.sys, "executable", "/bin/false")
    path = tmp_path / "machine.json"
    assert "measuring the collectives of 2 ranks failed" in run(
        "env", "--measure", str(path), "--ranks", "2", status=1
    )
    assert not path.exists()
