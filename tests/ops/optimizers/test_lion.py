"""lion_step_ against a float64 reference and on bad input."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tests.ops.helpers import FLOAT_DTYPES, StepTensors, available_isas
from tests.ops.optimizers.test_adam import MOMENT_DTYPES, NAN, SEGMENTS, assert_near
from zero_ext import ops


@dataclass
class Hyper:
    """One row of the op's `hyper` argument."""

    lr: float = 1e-2
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.1
    maximize: float = 0

    def row(self) -> list[float]:
        return [self.lr, self.beta1, self.beta2, self.weight_decay, self.maximize]


ROWS = [Hyper(), Hyper(lr=3e-3, beta1=0.0, maximize=1), Hyper(), Hyper(beta1=0.3, beta2=0.0, weight_decay=0)]


@dataclass
class State(StepTensors):
    """The op's tensor arguments."""

    master: Tensor
    exp_avg: Tensor
    grad: Tensor
    param: Tensor | None
    segments: Tensor
    hyper: Tensor
    grad_scale: Tensor

    def step(self) -> None:
        ops.lion_step_(*self.arguments())


def make_state(
    generator: torch.Generator,
    count: int,
    segments: list[tuple[int, int]],
    rows: list[Hyper],
    moments: torch.dtype = torch.float32,
    grad: torch.dtype = torch.float32,
    param: torch.dtype | None = None,
    scale: float = 0.25,
) -> State:
    def normal() -> Tensor:
        return torch.randn(count, generator=generator)

    return State(
        master=normal(),
        exp_avg=normal().to(moments),
        grad=(normal() / scale).to(grad),
        param=None if param is None else torch.full((count,), NAN, dtype=param),
        segments=torch.tensor(segments, dtype=torch.int64).reshape(-1, 2),
        hyper=torch.tensor([row.row() for row in rows], dtype=torch.float64).reshape(-1, 5),
        grad_scale=torch.tensor(scale),
    )


def reference(state: State) -> tuple[Tensor, Tensor, Tensor]:
    """Master weights, moment and direction of the step, in float64, straight from the paper."""
    p, m = state.master.double().clone(), state.exp_avg.double().clone()
    direction = torch.ones_like(p)
    for (begin, end), row in zip(state.segments.tolist(), state.hyper.tolist(), strict=True):
        lr, beta1, beta2, weight_decay, maximize = row
        elements = slice(begin, end)
        g = state.grad[elements].double() * state.grad_scale.double() * (-1 if maximize else 1)
        direction[elements] = beta1 * m[elements] + (1 - beta1) * g
        p[elements] -= lr * (direction[elements].sign() + weight_decay * p[elements])
        m[elements] = beta2 * m[elements] + (1 - beta2) * g
    return p, m, direction


@pytest.mark.parametrize("param", [None, *FLOAT_DTYPES])
@pytest.mark.parametrize("grad", FLOAT_DTYPES)
@pytest.mark.parametrize("moments", MOMENT_DTYPES)
def test_matches_float64_reference(
    isa: str,
    generator: torch.Generator,
    moments: torch.dtype,
    grad: torch.dtype,
    param: torch.dtype | None,
) -> None:
    state = make_state(generator, 1013, SEGMENTS, ROWS, moments, grad, param)
    before = state.clone()
    master, exp_avg, direction = reference(state)
    state.step()
    clear = direction.abs() > 1e-6  # nearer to zero the sign is a matter of rounding
    assert clear.sum() > 1000
    assert_near(state.master[clear], master[clear], "master")
    assert_near(state.exp_avg, exp_avg, "exp_avg")
    assert torch.equal(state.grad, before.grad)
    inside = torch.zeros(1013, dtype=torch.bool)
    for begin, end in SEGMENTS:
        inside[begin:end] = True
    for name in ("master", "exp_avg"):
        assert torch.equal(getattr(state, name)[~inside], getattr(before, name)[~inside]), name
        assert not torch.equal(getattr(state, name)[inside], getattr(before, name)[inside]), name
    if param is not None:
        assert state.param is not None
        assert torch.equal(state.param[inside], state.master[inside].to(param))
        assert state.param[~inside].isnan().all()


def test_zero_stays_tiny_moves_and_nan_shows(isa: str) -> None:
    count = 40
    state = make_state(torch.Generator(), count, [(0, count)], [Hyper(weight_decay=0.0)], scale=1.0)
    state.master, state.exp_avg, state.grad = torch.ones(count), torch.zeros(count), torch.zeros(count)
    state.grad[3], state.exp_avg[4] = -0.0, -0.0
    state.grad[5], state.grad[6] = 1e-30, -1e-30
    state.grad[7], state.grad[8] = NAN, float("-inf")
    state.step()
    wanted = torch.ones(count)
    wanted[5], wanted[6], wanted[7], wanted[8] = 0.99, 1.01, NAN, 1.01
    assert torch.equal(state.master.nan_to_num(7), wanted.nan_to_num(7))
    assert state.exp_avg.isnan().nonzero().tolist() == [[7]]


def test_instruction_sets_threads_and_segmentation_agree_bit_for_bit(generator: torch.Generator) -> None:
    count = 2**18 + 77  # long enough for stores past the caches
    start = make_state(
        generator, count, [(0, count)], [Hyper()], torch.bfloat16, torch.bfloat16, torch.float16
    )
    results = []
    for name in available_isas():
        before, threads = ops.set_isa(name), torch.get_num_threads()
        full, split = start.clone(), start.clone()
        split.segments = torch.tensor([[0, 1], [1, 33_333], [33_333, count]])
        split.hyper = start.hyper.repeat(3, 1)
        try:
            torch.set_num_threads(1)
            full.step()
            torch.set_num_threads(3)
            split.step()
        finally:
            torch.set_num_threads(threads)
            ops.set_isa(before)
        results += [full, split]
    for other in results[1:]:
        for name in ("master", "exp_avg", "param"):
            assert torch.equal(getattr(results[0], name), getattr(other, name)), name
    assert not torch.equal(results[0].master, start.master)


def test_bumps_the_version_of_what_it_writes(generator: torch.Generator) -> None:
    state = make_state(generator, 10, [(0, 10)], [Hyper()], param=torch.bfloat16)
    written = [tensor for tensor in (state.master, state.exp_avg, state.param) if tensor is not None]
    before = [tensor._version for tensor in written]
    state.step()
    assert all(tensor._version > old for tensor, old in zip(written, before, strict=True))


def test_nothing_to_do_is_fine(generator: torch.Generator) -> None:
    state = make_state(generator, 4, [], [])
    before = state.clone()
    state.step()
    assert torch.equal(state.master, before.master)
    make_state(generator, 0, [(0, 0)], [Hyper()]).step()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", NAN),
        ("lr", float("inf")),
        ("beta1", 1.0),
        ("beta1", -0.1),
        ("beta1", NAN),
        ("beta2", 1.0),
        ("beta2", -1e-9),
        ("beta2", NAN),
        ("weight_decay", NAN),
        ("weight_decay", float("inf")),
        ("maximize", 0.5),
    ],
)
def test_refuses_hyper_parameters_by_name(generator: torch.Generator, name: str, value: float) -> None:
    state = make_state(generator, 8, [(0, 4), (4, 8)], [Hyper(), replace(Hyper(), **{name: value})])
    before = state.clone()
    with pytest.raises(RuntimeError, match=rf"lion_step_: {name} of hyper\[1\]: expected"):
        state.step()
    assert torch.equal(state.master, before.master)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("master", torch.zeros(8, dtype=torch.float64), "expected dtype Float"),
        ("master", torch.zeros(2, 4), "expected one dimension"),
        ("exp_avg", torch.zeros(8, dtype=torch.float16), "expected dtype Float or BFloat16"),
        ("exp_avg", torch.zeros(9), "expected one dimension with 8 elements"),
        ("exp_avg", torch.zeros(8, device="meta"), "expected all tensors on one device, got cpu, meta"),
        ("grad", torch.zeros(8, dtype=torch.int32), "expected dtype .*, got Int"),
        ("grad", torch.zeros(16)[::2], "expected a contiguous tensor"),
        ("param", torch.zeros(7), "expected one dimension with 8 elements"),
        ("segments", torch.tensor([[0, 9]]), r"segments\[0\]: .*got \[0, 9\)"),
        ("segments", torch.tensor([[5, 4]]), r"segments\[0\]: .*got \[5, 4\)"),
        ("hyper", torch.zeros(1, 8, dtype=torch.float64), r"expected shape \[1, 5\] \(lr, beta1, beta2"),
        ("grad_scale", torch.ones(1), "expected a 0-d tensor"),
    ],
)
def test_refuses_wrong_arguments_by_name(
    generator: torch.Generator, name: str, value: Tensor, message: str
) -> None:
    state = make_state(generator, 8, [(0, 8)], [Hyper()], param=torch.bfloat16)
    before = state.clone()
    setattr(state, name, value)
    with pytest.raises(RuntimeError, match=f"lion_step_: .*{message}") as error:
        state.step()
    assert value.is_meta or name in str(error.value)
    for unchanged in ("master", "exp_avg"):
        if unchanged != name:
            assert torch.equal(getattr(state, unchanged), getattr(before, unchanged))


@pytest.mark.parametrize("scale", [NAN, float("inf")])
def test_a_scale_that_is_not_finite_changes_nothing(generator: torch.Generator, scale: float) -> None:
    state = make_state(generator, 8, [(0, 4), (5, 8)], [Hyper(), Hyper()], param=torch.bfloat16)
    state.grad_scale.fill_(scale)
    before = state.clone()
    state.step()
    assert torch.equal(state.master, before.master) and torch.equal(state.exp_avg, before.exp_avg)
    assert state.param is not None and bool(state.param.isnan().all())


def test_refuses_buffers_that_overlap(generator: torch.Generator) -> None:
    state = make_state(generator, 8, [(0, 8)], [Hyper()], param=torch.float32)
    state.param = state.master
    with pytest.raises(RuntimeError, match="expected its own memory, got some of argument"):
        state.step()
