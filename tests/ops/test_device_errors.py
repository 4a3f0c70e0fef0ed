"""Values that kernels cannot use: recorded on the device, raised when the host looks, harmless until then."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.accelerator.host_waits import HostWaits
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext import ops
from zero_ext.attention import BlockLayout

ROOT = Path(__file__).resolve().parents[2]
DEVICE = "stand_in:0"
ADAM = [1e-3, 0.9, 0.999, 1e-8, 0.1, 1.0, 1.0, 0.0]
LION = [1e-3, 0.9, 0.99, 0.1, 0.0]
LAMB = [1e-3, 0.9, 0.99, 1e-8, 0.1, 0.1, 0.01, 0.0, 0.0, 1.0]


def settings(rows: list[list[float]], bounds: list[list[int]], device: str) -> list[torch.Tensor]:
    return [
        torch.tensor(bounds, device=device),
        torch.tensor(rows, dtype=torch.float64, device=device),
        torch.ones((), device=device),
    ]


def buffers(count: int, device: str) -> list[torch.Tensor]:
    return [torch.rand(64).to(device) for _ in range(count)]


def adam(rows: list[list[float]], bounds: list[list[int]], device: str) -> list[torch.Tensor]:
    state = buffers(4, device)
    ops.adam_step_(*state, None, *settings(rows, bounds, device))
    return state


def adam_8bit(rows: list[list[float]], bounds: list[list[int]], device: str) -> list[torch.Tensor]:
    codes = [
        each.to(device) for signed in (True, False) for each in ops.quantize_blockwise(torch.rand(64), signed)
    ]
    master, grad = buffers(2, device)
    state = [master, codes[0], codes[2], codes[1], codes[3], grad]
    ops.adam_step_8bit_(
        master,
        ops.Quantized(codes[0], codes[1]),
        ops.Quantized(codes[2], codes[3]),
        grad,
        None,
        *settings(rows, bounds, device),
    )
    return state


def lion(rows: list[list[float]], bounds: list[list[int]], device: str) -> list[torch.Tensor]:
    state = buffers(3, device)
    ops.lion_step_(*state, None, *settings(rows, bounds, device))
    return state


def lamb(rows: list[list[float]], bounds: list[list[int]], device: str) -> list[torch.Tensor]:
    state = buffers(4, device)
    ops.lamb_step_(*state, None, *settings(rows, bounds, device))
    return state


def lamb_norms(rows: list[list[float]], bounds: list[list[int]], device: str) -> list[torch.Tensor]:
    norms = torch.zeros(len(rows), 2, ops.ACCUMULATOR_ENTRIES, dtype=torch.int64, device=device)
    ops.lamb_norms_(*buffers(4, device), *settings(rows, bounds, device), norms)
    return [norms]


def without(make: Callable[..., list[torch.Tensor]], seed: int, *arguments: Any) -> list[torch.Tensor]:
    """What the buffers of a step hold that has no segments, so that nothing is changed."""
    torch.manual_seed(seed)
    rows, bounds, device = arguments
    return [each.cpu() for each in make(rows, [[0, 0]] * len(bounds), device)]


def with_value(row: list[float], position: int, value: float) -> list[float]:
    return [*row[:position], value, *row[position + 1 :]]


HALVES = [[0, 30], [30, 64]]
# By op: how it is called, a good row, the place of a bad value with what is said of it.
CASES: dict[str, tuple[Callable[..., list[torch.Tensor]], list[float], int, float, str]] = {
    "adam_step_": (adam, ADAM, 1, 1.5, "beta1 of hyper[1]: expected in [0, 1), got 1.5."),
    "adam_step_8bit_": (adam_8bit, ADAM, 5, 0.0, "step of hyper[1]: expected finite and at least 1, got 0."),
    "lion_step_": (lion, LION, 3, math.inf, "weight_decay of hyper[1]: expected finite, got inf."),
    "lamb_step_": (lamb, LAMB, 5, 2.0, "correction1 of hyper[1]: expected in (0, 1], got 2."),
    "lamb_norms_": (lamb_norms, LAMB, 8, 0.5, "maximize of hyper[1]: expected 0 or 1, got 0.5."),
}


@pytest.mark.parametrize("name", CASES)
@on_ranks(1, stand_in=True)
def test_a_step_with_a_bad_setting_changes_nothing_and_is_raised_once(world: World, name: str) -> None:
    make, row, position, value, said = CASES[name]
    good, bad = row, with_value(row, position, value)
    ops.raise_device_errors(DEVICE)
    untouched = without(make, world.seed, [good, good], HALVES, DEVICE)
    torch.manual_seed(world.seed)
    with HostWaits() as waits:
        state = make([good, bad], HALVES, DEVICE)
    assert waits.found == []
    assert all(torch.equal(each.cpu(), wanted) for each, wanted in zip(state, untouched, strict=True))
    with pytest.raises(RuntimeError, match=re.escape(f"stand_in:0: {name}: {said}")):
        ops.raise_device_errors(DEVICE)
    ops.raise_device_errors(DEVICE)
    torch.manual_seed(world.seed)
    changed = make([good, good], HALVES, DEVICE)
    assert not torch.equal(changed[0].cpu(), untouched[0])
    ops.raise_device_errors(DEVICE)


BOUNDS = {
    "begin of segments[1]: expected at least the end of the segment before, or 0, got 29.": [29, 64],
    "end of segments[1]: expected from the segment's begin to the number of elements, got 65.": [30, 65],
    "end of segments[1]: expected from the segment's begin to the number of elements, got 20.": [30, 20],
}


@pytest.mark.parametrize("said", BOUNDS)
@on_ranks(1, stand_in=True)
def test_segments_that_are_out_of_order_or_range_change_nothing(world: World, said: str) -> None:
    ops.raise_device_errors(DEVICE)
    untouched = without(adam, world.seed, [ADAM, ADAM], HALVES, DEVICE)
    torch.manual_seed(world.seed)
    state = adam([ADAM, ADAM], [[0, 30], BOUNDS[said]], DEVICE)
    assert all(torch.equal(each.cpu(), wanted) for each, wanted in zip(state, untouched, strict=True))
    with pytest.raises(RuntimeError, match=re.escape(f"adam_step_: {said}")):
        ops.raise_device_errors(DEVICE)


@on_ranks(1, stand_in=True)
def test_the_first_error_stays_and_each_device_has_its_own(world: World) -> None:
    for device in (DEVICE, "stand_in:1"):
        ops.raise_device_errors(device)
    lion([with_value(LION, 0, math.nan)], [[0, 64]], "stand_in:1")
    adam([with_value(ADAM, 2, -1.0)], [[0, 64]], DEVICE)
    adam([with_value(ADAM, 3, -2.0)], [[0, 64]], DEVICE)
    with pytest.raises(RuntimeError, match=r"stand_in:0: adam_step_: beta2 of hyper\[0\]: .*, got -1\."):
        ops.raise_device_errors(DEVICE)
    ops.raise_device_errors(DEVICE)
    with pytest.raises(
        RuntimeError, match=r"stand_in:1: lion_step_: lr of hyper\[0\]: expected finite, got nan"
    ):
        ops.raise_device_errors("stand_in:1")


@on_ranks(1, stand_in=True)
def test_a_layout_on_a_device_is_checked_where_the_host_reads_it(world: World) -> None:
    pointers, columns = (
        torch.tensor([[0, 2, 3]], dtype=torch.int32),
        torch.tensor([0, 1, 1], dtype=torch.int32),
    )
    good = BlockLayout(16, 1, 32, 32, pointers.to(DEVICE), columns.to(DEVICE))
    assert good.rows.tolist() == [0, 0, 1] and good.column_pointers.tolist() == [[0, 1, 3]]
    columns[1] = 7
    bad = BlockLayout(16, 1, 32, 32, pointers.to(DEVICE), columns.to(DEVICE))
    with pytest.raises(ValueError, match="columns: expected values from 0 to 1, got 0 to 7"):
        _ = bad.rows


def test_the_cpu_raises_immediately() -> None:
    with pytest.raises(RuntimeError, match=r"beta1 of hyper\[0\]: expected in \[0, 1\), got 1\.5"):
        adam([with_value(ADAM, 1, 1.5)], [[0, 64]], "cpu")
    ops.raise_device_errors("cpu")
    record = torch.full((ops.DEVICE_ERROR_WORDS,), 7)
    ops.pop_device_error_(record)
    assert not record.any() and ops.device_error_text(record) == ""


def test_a_record_is_read_as_text() -> None:
    value = torch.tensor([-2.5], dtype=torch.float64).view(torch.int64).item()
    record = torch.tensor([2, 5, 2, 1 << 40, 3, value, 8])
    said = "entry of values[1099511627776]: expected 0 or more for the unsigned code, got -2.5."
    assert ops.device_error_text(record) == f"quantize_blockwise: {said}"
    # One that another version wrote.
    unknown = torch.tensor([2, 99, -1, 0, 99, value, 99])
    assert ops.device_error_text(unknown) == "unknown: unknown of unknown[0]: expected unknown, got -2.5."
    assert ops.device_error_text(record - torch.tensor([1, 0, 0, 0, 0, 0, 0])) == ""  # not yet complete
    for bad in (record.int(), record[:6].clone(), record.view(1, 7)):
        with pytest.raises(RuntimeError, match="device_error_text: argument 'record'"):
            ops.device_error_text(bad)
        with pytest.raises(RuntimeError, match="pop_device_error_: argument 'record'"):
            ops.pop_device_error_(bad)


def test_no_kernel_ends_the_process() -> None:
    """A trap would make all later CUDA calls of the process fail."""
    files = [
        path for path in (ROOT / "csrc" / "cuda").rglob("*") if path.suffix in {".h", ".cu", ".cuh", ".cpp"}
    ]
    found = [path.name for path in files if re.search(r"\b(__trap|trap;|assert\(|printf)", path.read_text())]
    assert len(files) > 30 and found == []
