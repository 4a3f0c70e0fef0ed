"""lamb_norms_ and lamb_step_ against a float64 reference and on bad input."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from tests.ops.helpers import FLOAT_DTYPES, StepTensors, available_isas
from tests.ops.optimizers.test_adam import MOMENT_DTYPES, NAN, SEGMENTS, assert_near
from zero_ext import ops


@dataclass
class Hyper:
    """One row of the ops' `hyper` argument."""

    lr: float = 1e-2
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-6
    weight_decay: float = 0.1
    correction1: float = 0.3
    correction2: float = 0.04
    eps_inside_sqrt: float = 0
    maximize: float = 0
    trust_ratio: float = 1.7

    def row(self) -> list[float]:
        return [getattr(self, name) for name in self.__dataclass_fields__]


ROWS = [
    Hyper(),
    Hyper(lr=3e-3, beta1=0.0, correction1=1, maximize=1, eps_inside_sqrt=1, eps=0.1),
    Hyper(trust_ratio=0.01),
    Hyper(beta1=0.3, beta2=0.0, weight_decay=0, eps=1e-3, correction1=1, correction2=1),
]


@dataclass
class State(StepTensors):
    """lamb_step_'s tensor arguments."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    grad: Tensor
    param: Tensor | None
    segments: Tensor
    hyper: Tensor
    grad_scale: Tensor

    def step(self) -> None:
        ops.lamb_step_(*self.arguments())

    def norms(self) -> Tensor:
        norms = torch.zeros(self.segments.shape[0], 2, 33, dtype=torch.int64)
        self.add_norms(norms)
        return norms

    def add_norms(self, norms: Tensor) -> None:
        buffers = (self.master, self.exp_avg, self.exp_avg_sq, self.grad)
        ops.lamb_norms_(*buffers, self.segments, self.hyper, self.grad_scale, norms)


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
        exp_avg_sq=normal().square().add(0.1).to(moments),
        grad=(normal() / scale).to(grad),
        param=None if param is None else torch.full((count,), NAN, dtype=param),
        segments=torch.tensor(segments, dtype=torch.int64).reshape(-1, 2),
        hyper=torch.tensor([row.row() for row in rows], dtype=torch.float64).reshape(-1, 10),
        grad_scale=torch.tensor(scale),
    )


def reference(state: State) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Master weights, moments, and the updates of the segments, in float64, straight from the paper."""
    p, m, v = (values.double().clone() for values in (state.master, state.exp_avg, state.exp_avg_sq))
    updates = []
    for (begin, end), row in zip(state.segments.tolist(), state.hyper.tolist(), strict=True):
        h = Hyper(*row)
        elements = slice(begin, end)
        g = state.grad[elements].double() * state.grad_scale.double() * (-1 if h.maximize else 1)
        m[elements] = h.beta1 * m[elements] + (1 - h.beta1) * g
        v[elements] = h.beta2 * v[elements] + (1 - h.beta2) * g * g
        square = v[elements] / h.correction2
        root = (square + h.eps).sqrt() if h.eps_inside_sqrt else square.sqrt() + h.eps
        updates.append(m[elements] / h.correction1 / root + h.weight_decay * p[elements])
        p[elements] -= h.lr * h.trust_ratio * updates[-1]
    return p, m, v, updates


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
    master, exp_avg, exp_avg_sq, updates = reference(state)
    norms = state.norms()
    for name in ("master", "exp_avg", "exp_avg_sq"):
        assert torch.equal(getattr(state, name), getattr(before, name))
    for (begin, end), (of_weights, of_updates), update in zip(SEGMENTS, norms, updates, strict=True):
        wanted = sum(Fraction(value) ** 2 for value in before.master[begin:end].tolist())
        assert float(ops.squared_norm_value(of_weights)) == float(wanted)
        torch.testing.assert_close(
            ops.squared_norm_value(of_updates), update.square().sum(), rtol=1e-5, atol=0
        )
    state.step()
    assert_near(state.master, master, "master")
    assert_near(state.exp_avg, exp_avg, "exp_avg")
    assert_near(state.exp_avg_sq, exp_avg_sq, "exp_avg_sq")
    assert torch.equal(state.grad, before.grad)
    inside = torch.zeros(1013, dtype=torch.bool)
    for begin, end in SEGMENTS:
        inside[begin:end] = True
    for name in ("master", "exp_avg", "exp_avg_sq"):
        assert torch.equal(getattr(state, name)[~inside], getattr(before, name)[~inside]), name
        assert not torch.equal(getattr(state, name)[inside], getattr(before, name)[inside]), name
    if param is not None:
        assert state.param is not None
        assert torch.equal(state.param[inside], state.master[inside].to(param))
        assert state.param[~inside].isnan().all()


def test_the_norm_is_that_of_the_step(isa: str, generator: torch.Generator) -> None:
    """Of steps of 1 from where they lead to powers of two, so that differences are exact."""
    state = make_state(generator, 3000, [(0, 3000)], [Hyper(lr=1.0, trust_ratio=1.0)])
    found = float(ops.squared_norm_value(state.norms()[0, 1]))
    before = state.master.double()
    state.step()
    assert abs(found - float((state.master - before).square().sum())) <= 1e-5 * found


def test_instruction_sets_threads_and_cuts_agree_bit_for_bit(generator: torch.Generator) -> None:
    count = 2**18 + 77  # long enough for stores past the caches
    start = make_state(
        generator, count, [(0, count)], [Hyper()], torch.bfloat16, torch.bfloat16, torch.float16
    )
    start.master *= torch.randn(count, generator=generator).mul(15).exp2()  # of all magnitudes
    results = []
    for name in available_isas():
        before, threads = ops.set_isa(name), torch.get_num_threads()
        full, split = start.clone(), start.clone()
        split.segments = torch.tensor([[0, 1], [1, 33_333], [33_333, count]])
        split.hyper = start.hyper.repeat(3, 1)
        try:
            torch.set_num_threads(1)
            results.append((full.norms().sum(0), full))
            full.step()
            torch.set_num_threads(3)
            results.append((split.norms().sum(0), split))
            split.step()
        finally:
            torch.set_num_threads(threads)
            ops.set_isa(before)
    values = [[float(ops.squared_norm_value(each)) for each in norms] for norms, _ in results]
    assert all(each == values[0] for each in values) and min(values[0]) > 0
    for _, other in results[1:]:
        for name in ("master", "exp_avg", "exp_avg_sq", "param"):
            assert torch.equal(getattr(results[0][1], name), getattr(other, name)), name


def test_what_is_not_finite_shows_in_its_own_norms(generator: torch.Generator) -> None:
    state = make_state(generator, 40, [(0, 20), (20, 40)], [Hyper(), Hyper(trust_ratio=NAN)])
    state.grad[3] = NAN
    values = [[float(ops.squared_norm_value(each)) for each in norms] for norms in state.norms()]
    assert values[0][0] > 0 and values[0][1] != values[0][1] and min(values[1]) > 0
    state.step()
    assert state.master[:20].isnan().nonzero().tolist() == [[3]] and state.master[20:].isnan().all()


def test_zero_has_the_norm_zero(isa: str) -> None:
    state = make_state(torch.Generator(), 40, [(0, 40)], [Hyper()])
    for values in (state.master, state.exp_avg, state.exp_avg_sq, state.grad):
        values.zero_()
    assert not state.norms().any()
    state.step()
    assert not state.master.any()


def test_bumps_the_version_of_what_it_writes(generator: torch.Generator) -> None:
    state = make_state(generator, 10, [(0, 10)], [Hyper()], param=torch.bfloat16)
    norms = torch.zeros(1, 2, 33, dtype=torch.int64)
    state.add_norms(norms)
    assert norms._version == 1 and state.master._version == 0
    before = [None if each is None else each._version for each in state.arguments()]
    state.step()
    after = [None if each is None else each._version for each in state.arguments()]
    assert [one != two for one, two in zip(before, after, strict=True)] == [True] * 3 + [False, True] + [
        False
    ] * 3


def test_nothing_to_do_is_fine(generator: torch.Generator) -> None:
    state = make_state(generator, 4, [], [])
    before = state.clone()
    state.step()
    assert torch.equal(state.master, before.master) and state.norms().numel() == 0
    make_state(generator, 0, [(0, 0)], [Hyper()]).step()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", NAN),
        ("beta1", 1.0),
        ("beta2", -1e-9),
        ("eps", -1.0),
        ("eps", NAN),
        ("weight_decay", float("inf")),
        ("correction1", 0.0),
        ("correction2", 1.5),
        ("correction2", NAN),
        ("eps_inside_sqrt", 2),
        ("maximize", 0.5),
    ],
)
def test_refuses_hyper_parameters_by_name(generator: torch.Generator, name: str, value: float) -> None:
    state = make_state(generator, 8, [(0, 4), (4, 8)], [Hyper(), replace(Hyper(), **{name: value})])
    before = state.clone()
    with pytest.raises(RuntimeError, match=rf"lamb_step_: {name} of hyper\[1\]: expected"):
        state.step()
    with pytest.raises(RuntimeError, match=rf"lamb_norms_: {name} of hyper\[1\]: expected"):
        state.norms()
    assert torch.equal(state.master, before.master)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("master", torch.zeros(8, dtype=torch.float64), "expected dtype Float"),
        ("exp_avg", torch.zeros(8, dtype=torch.float16), "expected dtype Float or BFloat16"),
        ("exp_avg_sq", torch.zeros(8, dtype=torch.bfloat16), "expected dtype Float"),
        ("exp_avg", torch.zeros(8, device="meta"), "expected all tensors on one device, got cpu, meta"),
        ("grad", torch.zeros(16)[::2], "expected a contiguous tensor"),
        ("segments", torch.tensor([[0, 9]]), r"segments\[0\]: .*got \[0, 9\)"),
        (
            "hyper",
            torch.zeros(1, 8, dtype=torch.float64),
            r"expected shape \[1, 10\] \(lr, beta1, beta2, eps",
        ),
        ("grad_scale", torch.ones(1), "expected a 0-d tensor"),
    ],
)
def test_refuses_wrong_arguments_by_name(
    generator: torch.Generator, name: str, value: Tensor, message: str
) -> None:
    state = make_state(generator, 8, [(0, 8)], [Hyper()], param=torch.bfloat16)
    before = state.clone()
    setattr(state, name, value)
    with pytest.raises(RuntimeError, match=f"lamb_step_: .*{message}") as error:
        state.step()
    assert value.is_meta or name in str(error.value)
    norms = torch.zeros(1, 2, 33, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=f"lamb_norms_: .*{message}"):
        state.add_norms(norms)
    assert not norms.any()
    for unchanged in ("master", "exp_avg", "exp_avg_sq"):
        if unchanged != name:
            assert torch.equal(getattr(state, unchanged), getattr(before, unchanged))


@pytest.mark.parametrize(
    "norms",
    [torch.zeros(1, 2, 33), torch.zeros(2, 2, 33, dtype=torch.int64), torch.zeros(2, 33, dtype=torch.int64)],
)
def test_refuses_wrong_norms(generator: torch.Generator, norms: Tensor) -> None:
    with pytest.raises(RuntimeError, match=r"lamb_norms_: argument 'norms': expected (dtype|shape)"):
        make_state(generator, 8, [(0, 8)], [Hyper()]).add_norms(norms)


@pytest.mark.parametrize("scale", [NAN, float("inf")])
def test_a_scale_that_is_not_finite_changes_nothing(generator: torch.Generator, scale: float) -> None:
    state = make_state(generator, 8, [(0, 4), (5, 8)], [Hyper(), Hyper()], param=torch.bfloat16)
    state.grad_scale.fill_(scale)
    before = state.clone()
    assert not state.norms().any()
    state.step()
    assert torch.equal(state.master, before.master) and torch.equal(state.exp_avg, before.exp_avg)
    assert state.param is not None and bool(state.param.isnan().all())


def test_refuses_buffers_that_overlap(generator: torch.Generator) -> None:
    state = make_state(generator, 8, [(0, 8)], [Hyper()], param=torch.float32)
    state.exp_avg_sq = state.exp_avg
    with pytest.raises(RuntimeError, match="expected its own memory, got some of argument"):
        state.step()
