"""The GPU benchmarks at toy sizes on the CPU: the code that a GPU runs, and the arithmetic of its reports."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.gpu import adam, attention, capped, compression, copies, step, trial
from benchmarks.gpu.clock import Clock
from benchmarks.gpu.gpt import GPT, GPT_13B, TOY, XL, build
from benchmarks.gpu.overlap import hidden_share
from benchmarks.gpu.placement import Placement, choices, deepest_predicted
from benchmarks.gpu.plain_limit import deepest
from benchmarks.gpu.result import Budget, Result, Times

GIB = 2**30

CPU = torch.device("cpu")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trials within this process, and no DeepSpeed, whose import alone takes longer than the rest."""
    find = importlib.util.find_spec

    def without_deepspeed(name: str, package: str | None = None) -> Any:
        return None if name == "deepspeed" else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without_deepspeed)
    monkeypatch.setattr(capped.Trials, "_ask", lambda self, request: asdict(trial.main(request)))
    monkeypatch.setattr(step, "SECONDS_TO_PREPARE", 0.0)
    monkeypatch.setattr(step, "PROBE_BYTES", 2**22)
    monkeypatch.setattr(step, "SHARE_OF_HOOKS", 0.01)
    monkeypatch.setattr(step, "SHARE_OF_STEPS", 0.01)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
        monkeypatch.delenv(name)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_every_benchmark_runs_at_toy_size(quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    for result in (
        copies.measure(CPU, 0.01, True),
        adam.measure(CPU, 0.01, True),
        compression.measure(CPU, 0.01, True),
        attention.measure(CPU, 0.01, True),
        step.measure(CPU, 12.0, True),
        capped.measure(CPU, 32, "13b", 0.0, 60.0, True),
    ):
        result.finish()
    output = capsys.readouterr().out
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    tables = {table["title"]: table for result in found for table in result["tables"]}
    for title, count in (
        ("Copy rates", 5),
        ("Adam on 65,536 elements", 8),
        ("Compression of 65,536 elements", 13),
        ("Block-sparse attention", 16),
        ("Under a cap", 3),
    ):
        rows = next(table["rows"] for name, table in tables.items() if name.startswith(title))
        assert len(rows) == count, rows
    steps = next(table["rows"] for name, table in tables.items() if name.startswith("A step of gpt-toy, "))
    assert [row[0] for row in steps][:3] == [
        "plain loop, torch fused AdamW",
        "zero_ext 3 in memory",
        "zero_ext 3, optimizer and gradients on the host",
    ]
    assert all(row[-1] == "yes" for row in steps), steps
    assert any(name.endswith("with its optimizer on NVMe") for name in tables)
    bars = {bar["name"]: bar["value"] for bar in found[-1]["bars"]}
    assert len(bars) == 2 and all(value >= 1.0 for value in bars.values()), bars
    assert all(not result["failures"] for result in found)
    for table in tables.values():
        assert all(len(row) == len(table["columns"]) for row in table["rows"]), table["title"]


def test_storage_too_slow_for_a_step_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "written_per_second", lambda folder: 1e6)
    result = Result()
    steps = step.Steps(XL, CPU, 8, result)
    step.measure_nvme(steps, Clock(CPU), Budget(60.0))
    assert len(result.left_out) == 1 and "it needs 16.1 GB" in result.left_out[0]
    assert not result.tables and not result.failures


def test_shapes_count_their_parameters() -> None:
    for shape in (TOY, replace(TOY, layers=3, hidden=96, heads=3, vocabulary=101)):
        with torch.device("meta"):
            model = GPT(shape, checkpointing=False)
        assert sum(parameter.numel() for parameter in model.parameters()) == shape.parameters
    assert 1.25e9 < XL.parameters < 1.4e9 and 12.5e9 < GPT_13B.parameters < 13.5e9


def test_checkpointing_changes_no_gradient() -> None:
    ids = torch.randint(TOY.vocabulary, (2, TOY.positions + 1))
    gradients = []
    for checkpointing in (False, True):
        model = build(TOY, torch.device("cpu"), torch.float32, checkpointing)
        model(ids).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(*gradients, strict=True))
    assert abs(model(ids).item() - math.log(TOY.vocabulary)) < 0.3


@pytest.mark.parametrize(("limit", "start"), [(5, 5), (5, 4), (5, 6), (7, 3), (1, 3), (0, 2)])
def test_the_search_finds_the_deepest(limit: int, start: int) -> None:
    assert deepest(start, lambda depth: depth <= limit)[0] == limit


def test_13b_with_bf16_moments_uses_97_gibibytes_of_the_host() -> None:
    first = choices(GPT_13B, 32 * GIB, "bf16")[0]
    assert first.offload == {"optimizer": "host"}
    assert abs(first.host / GIB - 96.3) < 1 and 24 < first.device / GIB < 28
    assert first.fits(32 * GIB, 110 * GIB, 0) and not first.fits(32 * GIB, 100 * GIB, 0)
    assert not first.fits(24 * GIB, 110 * GIB, 0)
    assert 1 <= first.sequences(32 * GIB, 16) < 16


def test_a_trial_out_of_memory_is_repeated_with_half_the_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def ask(self: capped.Trials, request: dict[str, Any]) -> dict[str, Any]:
        asked.append(request["batch"])
        if len(asked) == 1:
            return {"trained": False, "reason": "OutOfMemoryError: no room", "batch": 6}
        return {"trained": True, "reason": "", "step_seconds": [1.0], "teraflops": 2.0, "batch": 3}

    monkeypatch.setattr(capped.Trials, "_ask", ask)
    result = Result()
    trials = capped.Trials(CPU, 10 * GIB, 100 * GIB, Budget(1e3), result, toy=False)
    trials.judge("bar", GPT_13B, 8.0, 9.0)
    assert asked == [16, 3]
    assert [(bar.name, bar.value, bar.met) for bar in result.bars] == [("bar", 9.0, True)]
    monkeypatch.setattr(capped.Trials, "_ask", lambda *_: {"trained": False, "reason": "ended"})
    trials.judge("other", GPT_13B, 8.0, 9.0)
    assert not result.bars[1].met
    monkeypatch.setattr(
        capped.Trials, "_ask", lambda *_: {"trained": False, "timed_out": True, "reason": "no end"}
    )
    trials.judge("late", GPT_13B, 8.0, 9.0)
    assert len(result.bars) == 2 and result.left_out == ["late: gpt-13b, no end"]


def test_predictions_go_on_linearly_until_a_tier_is_full() -> None:
    few = Placement("a", "bf16", {}, device=100, host=1000, nvme=0)
    many = Placement("a", "bf16", {}, device=110, host=2000, nvme=0)
    assert deepest_predicted(few, many, (1, 2), cap=10**9, host=int(10_000 / 0.93) + 1, disk=0) == 10
    assert deepest_predicted(few, many, (1, 2), cap=int(130 / 0.94) + 1, host=10**9, disk=0) == 4


def test_hidden_share_is_what_does_not_show() -> None:
    assert hidden_share(compute=4.0, transfer=1.0, update=2.0, step=7.0) == 0.0
    assert hidden_share(compute=4.0, transfer=1.0, update=2.0, step=6.0) == 1.0
    assert hidden_share(compute=1.0, transfer=2.0, update=0.0, step=2.5) == 0.5


def test_times_compare_round_by_round() -> None:
    assert Times([1.0, 2.0, 4.0]).against(Times([2.0, 4.0, 4.0])) == 2.0
    assert Times([2.0, 1.0, 9.0]).rate(10) == 5.0


def test_a_failure_of_our_own_fails_the_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    result = Result()
    with result.attempt("peer", own=False):
        raise RuntimeError("no memory\nat all")
    result.finish()
    assert result.left_out == ["peer: RuntimeError: no memory"]
    with result.attempt("ours", own=True):
        raise ValueError("wrong")
    with pytest.raises(SystemExit):
        result.finish()
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["failures"] == ["ours: ValueError: wrong"]
