"""Values that kernels cannot use: recorded on the device, raised when the host looks, harmless until then."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.accelerator.host_waits import HostWaits
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.ops.optimizer_steps import ADAM, ADAM_8BIT, LAMB, LION, State, StepOp
from zero_ext import ops
from zero_ext.attention import BlockLayout

ROOT = Path(__file__).resolve().parents[2]
DEVICE = "stand_in:0"


def state_of(
    family: StepOp,
    seed: int,
    rows: list[dict[str, float]],
    segments: Sequence[tuple[int, int]] = ((0, 30), (30, 64)),
    device: str = DEVICE,
) -> State:
    """Random arguments of a step on ``device``."""
    state = family.state(torch.Generator().manual_seed(seed), 64, segments[: len(rows)], rows, scale=1.0)
    return state.map(lambda each: each.to(device))


def assert_refused(state: State, seed: int, said: str) -> None:
    """Nothing waits for the device, nothing is changed, and the error is raised once."""
    ops.raise_device_errors(DEVICE)
    before = state.clone()
    with HostWaits() as waits:
        state.step()
    assert waits.found == []
    assert state.map(Tensor.cpu).differing(before.map(Tensor.cpu)) == []
    with pytest.raises(RuntimeError, match=re.escape(f"stand_in:0: {state.family.name}: {said}")):
        ops.raise_device_errors(DEVICE)
    ops.raise_device_errors(DEVICE)
    good = state_of(state.family, seed, [{}, {}])
    before = good.clone()
    good.step()
    assert "master" in good.map(Tensor.cpu).differing(before.map(Tensor.cpu))
    ops.raise_device_errors(DEVICE)


# By op: a bad value and what is said of it.
CASES: dict[str, tuple[StepOp, dict[str, float], str]] = {
    "adam": (ADAM, {"beta1": 1.5}, "beta1 of hyper[1]: expected in [0, 1), got 1.5."),
    "8-bit adam": (ADAM_8BIT, {"step": 0.0}, "step of hyper[1]: expected finite and at least 1, got 0."),
    "lion": (LION, {"weight_decay": math.inf}, "weight_decay of hyper[1]: expected finite, got inf."),
    "lamb": (LAMB, {"correction1": 2.0}, "correction1 of hyper[1]: expected in (0, 1], got 2."),
}


@pytest.mark.parametrize("name", CASES)
@on_ranks(1, stand_in=True)
def test_a_step_with_a_bad_setting_changes_nothing_and_is_raised_once(world: World, name: str) -> None:
    family, bad, said = CASES[name]
    assert_refused(state_of(family, world.seed, [{}, bad]), world.seed, said)


@on_ranks(1, stand_in=True)
def test_norms_with_a_bad_setting_stay_zero(world: World) -> None:
    ops.raise_device_errors(DEVICE)
    assert not state_of(LAMB, world.seed, [{}, {"maximize": 0.5}]).norms().cpu().any()
    said = "lamb_norms_: maximize of hyper[1]: expected 0 or 1, got 0.5."
    with pytest.raises(RuntimeError, match=re.escape(f"stand_in:0: {said}")):
        ops.raise_device_errors(DEVICE)
    assert state_of(LAMB, world.seed, [{}, {}]).norms().cpu().any()
    ops.raise_device_errors(DEVICE)


BOUNDS = {
    "begin of segments[1]: expected at least the end of the segment before, or 0, got 29.": (29, 64),
    "end of segments[1]: expected from the segment's begin to the number of elements, got 65.": (30, 65),
    "end of segments[1]: expected from the segment's begin to the number of elements, got 20.": (30, 20),
}


@pytest.mark.parametrize("said", BOUNDS)
@on_ranks(1, stand_in=True)
def test_segments_that_are_out_of_order_or_range_change_nothing(world: World, said: str) -> None:
    segments = [(0, 30), BOUNDS[said]]
    assert_refused(state_of(ADAM, world.seed, [{}, {}], segments), world.seed, said)


@on_ranks(1, stand_in=True)
def test_the_first_error_stays_and_each_device_has_its_own(world: World) -> None:
    for device in (DEVICE, "stand_in:1"):
        ops.raise_device_errors(device)
    state_of(LION, world.seed, [{"lr": math.nan}], [(0, 64)], "stand_in:1").step()
    state_of(ADAM, world.seed, [{"beta2": -1.0}], [(0, 64)]).step()
    state_of(ADAM, world.seed, [{"eps": -2.0}], [(0, 64)]).step()
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
        state_of(ADAM, 7, [{"beta1": 1.5}], [(0, 64)], "cpu").step()
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
