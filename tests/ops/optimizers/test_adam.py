"""adam_step_ against a float64 reference, against torch's own optimizers, and on bad input."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tests.ops.helpers import FLOAT_DTYPES, StepTensors, available_isas
from zero_ext import ops

MOMENT_DTYPES = [torch.float32, torch.bfloat16]
NAN = float("nan")


@dataclass
class Hyper:
    """One row of the op's `hyper` argument."""

    lr: float = 1e-2
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.1
    step: float = 3
    decoupled: float = 1
    maximize: float = 0

    def row(self) -> list[float]:
        return [
            self.lr,
            self.beta1,
            self.beta2,
            self.eps,
            self.weight_decay,
            self.step,
            self.decoupled,
            self.maximize,
        ]


@dataclass
class State(StepTensors):
    """The op's tensor arguments."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    grad: Tensor
    param: Tensor | None
    segments: Tensor
    hyper: Tensor
    grad_scale: Tensor

    def step(self) -> None:
        ops.adam_step_(*self.arguments())


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
        exp_avg_sq=normal().square().to(moments),
        grad=(normal() / scale).to(grad),
        param=None if param is None else torch.full((count,), NAN, dtype=param),
        segments=torch.tensor(segments, dtype=torch.int64).reshape(-1, 2),
        hyper=torch.tensor([row.row() for row in rows], dtype=torch.float64).reshape(-1, 8),
        grad_scale=torch.tensor(scale),
    )


def reference(state: State) -> tuple[Tensor, Tensor, Tensor]:
    """Master weights and moments after the step, in float64, straight from the papers."""
    p, m, v = (t.double().clone() for t in (state.master, state.exp_avg, state.exp_avg_sq))
    for (begin, end), row in zip(state.segments.tolist(), state.hyper.tolist(), strict=True):
        lr, beta1, beta2, eps, weight_decay, step, decoupled, maximize = row
        elements = slice(begin, end)
        g = state.grad[elements].double() * state.grad_scale.double() * (-1 if maximize else 1)
        if decoupled:
            p[elements] *= 1 - lr * weight_decay
        else:
            g = g + weight_decay * p[elements]
        m[elements] = beta1 * m[elements] + (1 - beta1) * g
        v[elements] = beta2 * v[elements] + (1 - beta2) * g * g
        m_hat = m[elements] / (1 - beta1**step)
        v_hat = v[elements] / (1 - beta2**step)
        p[elements] -= lr * m_hat / (v_hat.sqrt() + eps)
    return p, m, v


def assert_near(actual: Tensor, wanted: Tensor, name: str) -> None:
    unit = 2**-8 if actual.dtype == torch.bfloat16 else 4e-6
    error = (actual.double() - wanted).abs() / (wanted.abs() + 1)
    assert error.max().item() <= unit, f"{name}: relative error {error.max().item()}"


SEGMENTS = [(0, 5), (7, 300), (300, 300), (301, 1000)]
ROWS = [
    Hyper(),
    Hyper(lr=3e-3, beta1=0.3, decoupled=0, weight_decay=0.01, step=1),
    Hyper(),
    Hyper(beta1=0.0, maximize=1, eps=1e-3, step=1000, weight_decay=0.0),
]


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
    master, exp_avg, exp_avg_sq = reference(state)
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


def test_instruction_sets_agree_bit_for_bit(generator: torch.Generator) -> None:
    start = make_state(generator, 1013, SEGMENTS, ROWS, torch.bfloat16, torch.bfloat16, torch.float16)
    results = []
    for name in available_isas():
        before = ops.set_isa(name)
        state = start.clone()
        state.step()
        ops.set_isa(before)
        results.append(state)
    for other in results[1:]:
        for first, second in zip(results[0].arguments(), other.arguments(), strict=True):
            assert first is not None and second is not None
            assert torch.equal(first.nan_to_num(), second.nan_to_num())


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("maximize", [True, False])
def test_follows_torch_fused(generator: torch.Generator, decoupled: bool, maximize: bool) -> None:
    count = 40_001
    hyper = Hyper(lr=1e-3, decoupled=float(decoupled), maximize=float(maximize))
    state = make_state(generator, count, [(0, count)], [hyper], scale=1.0)
    state.exp_avg.zero_()
    state.exp_avg_sq.zero_()
    weight = torch.nn.Parameter(state.master.clone())
    truth = torch.nn.Parameter(state.master.double())
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    peer = kind([weight], lr=1e-3, weight_decay=0.1, maximize=maximize, fused=True)
    exact = kind([truth], lr=1e-3, weight_decay=0.1, maximize=maximize, fused=False, foreach=False)
    start = weight.detach().clone()
    for step in range(1, 31):
        gradient = torch.randn(count, generator=generator)
        weight.grad = gradient.clone()
        truth.grad = gradient.double()
        peer.step()
        exact.step()
        state.grad = gradient
        state.hyper = torch.tensor([replace(hyper, step=step).row()], dtype=torch.float64)
        state.step()
    assert (weight - start).norm() > 1
    assert (state.master - weight).norm() / weight.norm() <= 1e-6
    assert (state.master - truth).norm() <= 1.1 * (weight - truth).norm()
    torch.testing.assert_close(state.exp_avg, peer.state[weight]["exp_avg"], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(state.exp_avg_sq, peer.state[weight]["exp_avg_sq"], rtol=1e-5, atol=1e-9)


def test_result_does_not_depend_on_threads_or_segmentation(generator: torch.Generator) -> None:
    count = 100_003
    full = make_state(generator, count, [(0, count)], [Hyper()], param=torch.bfloat16)
    split = full.clone()
    split.segments = torch.tensor([[0, 1], [1, 33_333], [33_333, count]])
    split.hyper = full.hyper.repeat(3, 1)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        full.step()
        torch.set_num_threads(max(threads, 3))
        split.step()
    finally:
        torch.set_num_threads(threads)
    assert full.param is not None and split.param is not None
    assert torch.equal(full.master, split.master)
    assert torch.equal(full.param, split.param)


@pytest.mark.parametrize("param", FLOAT_DTYPES)
def test_long_ranges_stream_to_any_alignment(
    isa: str, generator: torch.Generator, param: torch.dtype
) -> None:
    count = 2 * 2**18 + 77
    start = make_state(generator, count, [(1, 5), (9, count)], [Hyper(), Hyper()], grad=torch.bfloat16)
    wanted = start.clone()
    before = ops.set_isa("scalar")
    wanted.step()
    ops.set_isa(before)
    for shift in (0, 1, 13):
        memory = torch.full((shift + count + 64,), -7.0, dtype=param)
        state = start.clone()
        state.param = memory[shift : shift + count]
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(2)
            state.step()
        finally:
            torch.set_num_threads(threads)
        assert torch.equal(state.master, wanted.master)
        for begin, end in [(1, 5), (9, count)]:
            assert torch.equal(state.param[begin:end], wanted.master[begin:end].to(param))
        assert (memory[:shift] == -7).all() and (memory[shift + count :] == -7).all()
        assert (state.param[[0, 5, 6, 7, 8]] == -7).all()


def test_bumps_the_version_of_what_it_writes(generator: torch.Generator) -> None:
    state = make_state(generator, 10, [(0, 10)], [Hyper()], param=torch.bfloat16)
    written = [state.master, state.exp_avg, state.exp_avg_sq, state.param]
    before = [tensor._version for tensor in written if tensor is not None]
    state.step()
    assert all(
        tensor._version > old for tensor, old in zip(written, before, strict=True) if tensor is not None
    )


@pytest.mark.parametrize("segments", [[], [(0, 0)]])
def test_nothing_to_do_is_fine(generator: torch.Generator, segments: list[tuple[int, int]]) -> None:
    state = make_state(generator, 4, segments, [Hyper()] * len(segments))
    before = state.clone()
    state.step()
    assert torch.equal(state.master, before.master)
    empty = make_state(generator, 0, segments, [Hyper()] * len(segments))
    empty.step()


@pytest.mark.parametrize("scale", [NAN, float("inf"), -float("inf")])
def test_a_scale_that_is_not_finite_changes_nothing(generator: torch.Generator, scale: float) -> None:
    state = make_state(generator, 1013, SEGMENTS, ROWS, param=torch.bfloat16, scale=1.0)
    state.grad_scale.fill_(scale)
    before = state.clone()
    state.step()
    for unchanged, was in zip(state.arguments(), before.arguments(), strict=True):
        assert unchanged is not None and was is not None
        assert torch.equal(unchanged.nan_to_num(-9.0), was.nan_to_num(-9.0))
    state.hyper[2, 5] = 0.0
    with pytest.raises(RuntimeError, match=r"adam_step_: step of hyper\[2\]: expected .*got 0"):
        state.step()


BAD_HYPER = [
    ("lr", NAN),
    ("lr", float("inf")),
    ("beta1", 1.0),
    ("beta1", -0.1),
    ("beta1", NAN),
    ("beta2", 1.0),
    ("beta2", -1e-9),
    ("beta2", NAN),
    ("eps", -1e-8),
    ("eps", NAN),
    ("eps", float("inf")),
    ("weight_decay", NAN),
    ("weight_decay", float("inf")),
    ("step", 0.0),
    ("step", NAN),
    ("decoupled", 0.5),
    ("maximize", 2.0),
]


@pytest.mark.parametrize(("name", "value"), BAD_HYPER)
def test_refuses_hyper_parameters_by_name(generator: torch.Generator, name: str, value: float) -> None:
    state = make_state(generator, 8, [(0, 4), (4, 8)], [Hyper(), replace(Hyper(), **{name: value})])
    before = state.clone()
    with pytest.raises(RuntimeError, match=rf"adam_step_: {name} of hyper\[1\]: expected"):
        state.step()
    assert torch.equal(state.master, before.master)


def wrong_arguments() -> list[tuple[str, Tensor, str]]:
    """(argument, replacement, words of the message) for a state of eight elements."""
    cases: list[tuple[str, Tensor, str]] = []
    for name in ("master", "exp_avg", "exp_avg_sq", "grad", "param"):
        cases += [
            (name, torch.zeros(8, dtype=torch.float64), "expected dtype .*, got Double"),
            (name, torch.zeros(16)[::2], "expected a contiguous tensor"),
            (name, torch.zeros(8, device="meta"), "expected all tensors on one device, got cpu, meta"),
        ]
        if name != "master":
            cases += [
                (name, torch.zeros(9), "expected one dimension with 8 elements"),
                (name, torch.zeros(2, 4), "expected one dimension with 8 elements"),
            ]
    return [
        *cases,
        ("master", torch.zeros(8, dtype=torch.bfloat16), "expected dtype Float"),
        ("master", torch.zeros(2, 4), "expected one dimension"),
        ("exp_avg", torch.zeros(8, dtype=torch.float16), "expected dtype Float or BFloat16"),
        ("exp_avg_sq", torch.zeros(8, dtype=torch.bfloat16), "expected dtype Float"),
        ("segments", torch.tensor([[0, 8]], dtype=torch.int32), "expected dtype Long"),
        ("segments", torch.tensor([0, 8]), r"expected shape \[S, 2\]"),
        ("segments", torch.tensor([[0, 9]]), r"segments\[0\]: .*got \[0, 9\)"),
        ("segments", torch.tensor([[-1, 4]]), r"segments\[0\]: .*got \[-1, 4\)"),
        ("segments", torch.tensor([[5, 4]]), r"segments\[0\]: .*got \[5, 4\)"),
        ("hyper", torch.zeros(1, 8), "expected dtype Double"),
        ("hyper", torch.zeros(2, 8, dtype=torch.float64), r"expected shape \[1, 8\]"),
        ("hyper", torch.zeros(1, 7, dtype=torch.float64), r"expected shape \[1, 8\]"),
        ("grad_scale", torch.tensor(1.0, dtype=torch.float64), "expected dtype Float"),
        ("grad_scale", torch.ones(1), "expected a 0-d tensor"),
    ]


@pytest.mark.parametrize(("name", "value", "message"), wrong_arguments())
def test_refuses_wrong_arguments_by_name(
    generator: torch.Generator, name: str, value: Tensor, message: str
) -> None:
    state = make_state(generator, 8, [(0, 8)], [Hyper()], param=torch.bfloat16)
    before = state.clone()
    setattr(state, name, value)
    with pytest.raises(RuntimeError, match=f"adam_step_: .*{message}") as error:
        state.step()
    assert value.is_meta or name in str(error.value)
    for unchanged in ("master", "exp_avg", "exp_avg_sq"):
        if unchanged != name:
            assert torch.equal(getattr(state, unchanged), getattr(before, unchanged))


def test_refuses_segments_that_overlap(generator: torch.Generator) -> None:
    state = make_state(generator, 8, [(0, 5), (4, 8)], [Hyper(), Hyper()])
    with pytest.raises(RuntimeError, match=r"segments\[1\]: .*got \[4, 8\).*disjoint"):
        state.step()


def test_refuses_buffers_that_overlap(generator: torch.Generator) -> None:
    state = make_state(generator, 8, [(0, 8)], [Hyper()])
    memory = torch.zeros(12)
    state.exp_avg, state.exp_avg_sq = memory[:8], memory[4:]
    with pytest.raises(
        RuntimeError, match="'exp_avg_sq': expected its own memory, got some of argument 'exp_avg'"
    ):
        state.step()
    state = make_state(generator, 8, [(0, 8)], [Hyper()], param=torch.float32)
    state.param = state.master
    with pytest.raises(RuntimeError, match="expected its own memory, got some of argument"):
        state.step()
