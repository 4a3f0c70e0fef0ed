"""adam_step_, lamb_step_ and lion_step_: against float64 references, torch's Adam, and on bad input."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor

from tests.ops.helpers import FLOAT_DTYPES, available_isas
from tests.ops.optimizer_steps import (
    ADAM,
    ADAM_8BIT,
    INF,
    LAMB,
    LION,
    MOMENT_DTYPES,
    NAN,
    SEGMENTS,
    STEP_OPS,
    State,
    StepOp,
    assert_near,
    reference,
)
from zero_ext import ops

every_op = pytest.mark.parametrize("family", STEP_OPS, ids=lambda family: family.name)
ALL_STEPS = (*STEP_OPS, ADAM_8BIT)
COUNT = 300  # more than a block of 8-bit moments
every_step = pytest.mark.parametrize("family", ALL_STEPS, ids=lambda family: family.name)


def inside_segments(count: int) -> Tensor:
    inside = torch.zeros(count, dtype=torch.bool)
    for begin, end in SEGMENTS:
        inside[begin:end] = True
    return inside


@every_op
@pytest.mark.parametrize("param", [None, *FLOAT_DTYPES])
@pytest.mark.parametrize("grad", FLOAT_DTYPES)
@pytest.mark.parametrize("moments", MOMENT_DTYPES)
def test_matches_float64_reference(
    isa: str,
    generator: torch.Generator,
    family: StepOp,
    moments: torch.dtype,
    grad: torch.dtype,
    param: torch.dtype | None,
) -> None:
    state = family.state(generator, 1013, moments=moments, grad=grad, param=param)
    before, wanted = state.clone(), reference(state)
    if family is LAMB:
        assert_norms_match(state, before, wanted.updates)
    state.step()
    clear = wanted.direction.abs() > 1e-6  # nearer to zero Lion's sign is a matter of rounding
    assert clear.sum() > 1000
    assert_near(state.master[clear], wanted.values["master"][clear], "master")
    for name in family.moments:
        assert_near(getattr(state, name), wanted.values[name], name)
    assert torch.equal(state.grad, before.grad)
    inside = inside_segments(1013)
    for name in family.values:
        assert torch.equal(getattr(state, name)[~inside], getattr(before, name)[~inside]), name
        assert not torch.equal(getattr(state, name)[inside], getattr(before, name)[inside]), name
    if param is not None:
        assert torch.equal(state.param[inside], state.master[inside].to(param))
        assert state.param[~inside].isnan().all()


def assert_norms_match(state: State, before: State, updates: list[Tensor]) -> None:
    norms = state.norms()
    for name in LAMB.values:
        assert torch.equal(getattr(state, name), getattr(before, name))
    for (begin, end), (of_weights, of_updates), update in zip(SEGMENTS, norms, updates, strict=True):
        wanted = sum(Fraction(value) ** 2 for value in before.master[begin:end].tolist())
        assert float(ops.squared_norm_value(of_weights)) == float(wanted)
        torch.testing.assert_close(
            ops.squared_norm_value(of_updates), update.square().sum(), rtol=1e-5, atol=0
        )


@every_op
def test_instruction_sets_threads_and_cuts_agree_bit_for_bit(
    generator: torch.Generator, family: StepOp
) -> None:
    count = 2**18 + 77  # long enough for stores past the caches
    dtypes = (torch.bfloat16, torch.bfloat16, torch.float16)
    start = family.state(generator, count, [(0, count)], [{}], *dtypes)
    start.master *= torch.randn(count, generator=generator).mul(15).exp2()  # of all magnitudes
    mixed = family.state(generator, 1013, SEGMENTS, None, *dtypes)
    results, norms = [], []
    for name in available_isas():
        before, threads = ops.set_isa(name), torch.get_num_threads()
        full, split, short = start.clone(), start.clone(), mixed.clone()
        split.segments = torch.tensor([[0, 1], [1, 33_333], [33_333, count]])
        split.hyper = start.hyper.repeat(3, 1)
        try:
            for number, state in ((1, full), (3, split)):
                torch.set_num_threads(number)
                if family is LAMB:
                    norms.append([float(ops.squared_norm_value(each)) for each in state.norms().sum(0)])
                state.step()
            short.step()
        finally:
            torch.set_num_threads(threads)
            ops.set_isa(before)
        results += [(full, short), (split, short)]
    for long, short in results[1:]:
        for name in (*family.values, "param"):
            assert torch.equal(getattr(results[0][0], name), getattr(long, name)), name
            first, other = getattr(results[0][1], name), getattr(short, name)
            assert torch.equal(first.nan_to_num(), other.nan_to_num()), name
    assert not torch.equal(results[0][0].master, start.master)
    assert all(each == norms[0] and min(each) > 0 for each in norms)


@every_op
@pytest.mark.parametrize("param", FLOAT_DTYPES)
def test_long_ranges_stream_to_any_alignment(
    isa: str, generator: torch.Generator, family: StepOp, param: torch.dtype
) -> None:
    count, segments = 2 * 2**18 + 77, [(1, 5), (9, 2 * 2**18 + 77)]
    start = family.state(generator, count, segments, [{}, {}], grad=torch.bfloat16)
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
        for begin, end in segments:
            assert torch.equal(state.param[begin:end], wanted.master[begin:end].to(param))
        assert (memory[:shift] == -7).all() and (memory[shift + count :] == -7).all()
        assert (state.param[[0, 5, 6, 7, 8]] == -7).all()


@every_step
def test_bumps_the_version_of_what_it_writes(generator: torch.Generator, family: StepOp) -> None:
    state = family.state(generator, 10, [(0, 10)], [{}], param=torch.bfloat16)
    if family is LAMB:
        norms = torch.zeros(1, 2, 33, dtype=torch.int64)
        state.add_norms(norms)
        assert norms._version == 1 and state.master._version == 0
    before = {name: tensor._version for name, tensor in state.named().items()}
    state.step()
    bumped = {name for name, tensor in state.named().items() if tensor._version != before[name]}
    assert bumped == {*family.values, "param"}


@every_step
@pytest.mark.parametrize("segments", [[], [(0, 0)], [(4, 4)]], ids=["none", "empty", "at the end"])
def test_nothing_to_do_is_fine(
    generator: torch.Generator, family: StepOp, segments: list[tuple[int, int]]
) -> None:
    state = family.state(generator, 4, segments, [{}] * len(segments))
    before = state.clone()
    state.step()
    assert state.differing(before) == []
    if family is LAMB:
        assert not state.norms().any()
    family.state(generator, 0, [(0, 0)] * len(segments), [{}] * len(segments)).step()


@every_step
@pytest.mark.parametrize("scale", [NAN, INF, -INF])
def test_a_scale_that_is_not_finite_changes_nothing(
    generator: torch.Generator, family: StepOp, scale: float
) -> None:
    state = family.state(generator, 1013, param=torch.bfloat16, scale=1.0)
    state.grad_scale.fill_(scale)
    before = state.clone()
    if family is LAMB:
        assert not state.norms().any()
    state.step()
    assert state.differing(before) == []
    name, value = family.bad_hyper[0]
    state.hyper[2, list(family.hyper).index(name)] = value
    with pytest.raises(RuntimeError, match=rf"{family.name}: {name} of hyper\[2\]: expected "):
        state.step()


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [(family, name, value) for family in ALL_STEPS for name, value in family.bad_hyper],
    ids=lambda each: each.name if isinstance(each, StepOp) else None,
)
def test_refuses_hyper_parameters_by_name(
    generator: torch.Generator, family: StepOp, name: str, value: float
) -> None:
    state = family.state(generator, 8, [(0, 4), (4, 8)], [{}, {name: value}])
    before = state.clone()
    with pytest.raises(RuntimeError, match=rf"{family.name}: {name} of hyper\[1\]: expected"):
        state.step()
    if family is LAMB:
        with pytest.raises(RuntimeError, match=rf"lamb_norms_: {name} of hyper\[1\]: expected"):
            state.norms()
    assert state.differing(before) == []


def wrong_arguments(family: StepOp) -> list[tuple[StepOp, str, Tensor, str]]:
    """(op, argument, replacement, words of the message) for a state of COUNT elements."""
    cases: list[tuple[str, Tensor, str]] = []
    state = family.state(torch.Generator(), COUNT, [(0, COUNT)], [{}], param=torch.float32)
    for name in (*family.values, "grad", "param"):
        count, dtype = getattr(state, name).numel(), getattr(state, name).dtype
        cases += [
            (name, torch.zeros(count, dtype=torch.float64), "expected dtype .*, got Double"),
            (name, torch.zeros(2 * count, dtype=dtype)[::2], "expected a contiguous tensor"),
            (name, torch.zeros(count, device="meta"), "expected all tensors on one device, got cpu, meta"),
        ]
        if name != "master":
            shapes = torch.zeros(count + 1, dtype=dtype), torch.zeros(2, count // 2, dtype=dtype)
            cases += [(name, each, f"expected one dimension with {count} elements") for each in shapes]
    if "exp_avg" in family.moments:
        cases.append(("exp_avg", torch.zeros(COUNT).half(), "expected dtype Float or BFloat16"))
    if "exp_avg_sq" in family.moments:
        cases.append(("exp_avg_sq", torch.zeros(COUNT).bfloat16(), "expected dtype Float"))
    size = len(family.hyper)
    shape = rf"expected shape \[1, {size}\] \(lr, beta1, beta2"
    cases += [
        ("master", torch.zeros(COUNT).bfloat16(), "expected dtype Float"),
        ("master", torch.zeros(2, COUNT // 2), "expected one dimension"),
        ("grad", torch.zeros(COUNT).int(), "expected dtype .*, got Int"),
        ("segments", torch.tensor([[0, 8]], dtype=torch.int32), "expected dtype Long"),
        ("segments", torch.tensor([0, 8]), r"expected shape \[S, 2\]"),
        ("segments", torch.tensor([[0, COUNT + 1]]), r"segments\[0\]: .*got \[0, 301\)"),
        ("segments", torch.tensor([[-1, 4]]), r"segments\[0\]: .*got \[-1, 4\)"),
        ("segments", torch.tensor([[5, 4]]), r"segments\[0\]: .*got \[5, 4\)"),
        ("hyper", torch.zeros(1, size), "expected dtype Double"),
        ("hyper", torch.zeros(2, size, dtype=torch.float64), shape),
        ("hyper", torch.zeros(1, size - 1, dtype=torch.float64), shape),
        ("grad_scale", torch.tensor(1.0, dtype=torch.float64), "expected dtype Float"),
        ("grad_scale", torch.ones(1), "expected a 0-d tensor"),
    ]
    return [(family, *case) for case in cases]


@pytest.mark.parametrize(
    ("family", "name", "value", "message"),
    [case for family in ALL_STEPS for case in wrong_arguments(family)],
    ids=lambda each: each.name if isinstance(each, StepOp) else None,
)
def test_refuses_wrong_arguments_by_name(
    generator: torch.Generator, family: StepOp, name: str, value: Tensor, message: str
) -> None:
    before = family.state(generator, COUNT, [(0, COUNT)], [{}], param=torch.bfloat16)
    state = before.clone().replaced(**{name: value})
    with pytest.raises(RuntimeError, match=f"{family.name}: .*{message}") as error:
        state.step()
    assert value.is_meta or name in str(error.value)
    if family is LAMB and name != "param":
        norms = torch.zeros(1, 2, 33, dtype=torch.int64)
        with pytest.raises(RuntimeError, match=f"lamb_norms_: .*{message}"):
            state.add_norms(norms)
        assert not norms.any()
    for unchanged in family.values:
        if unchanged != name:
            assert torch.equal(getattr(state, unchanged), getattr(before, unchanged))


@every_op
def test_refuses_segments_and_buffers_that_overlap(generator: torch.Generator, family: StepOp) -> None:
    with pytest.raises(RuntimeError, match=r"segments\[1\]: .*got \[4, 8\).*disjoint"):
        family.state(generator, 8, [(0, 5), (4, 8)], [{}, {}]).step()
    state = family.state(generator, 8, [(0, 8)], [{}], param=torch.float32)
    state.param = state.master
    with pytest.raises(RuntimeError, match="expected its own memory, got some of argument"):
        state.step()
    if "exp_avg_sq" in family.moments:
        state, memory = family.state(generator, 8, [(0, 8)], [{}]), torch.zeros(12)
        for second in (memory[4:], memory[:8]):
            state.exp_avg, state.exp_avg_sq = memory[:8], second
            message = "'exp_avg_sq': expected its own memory, got some of argument 'exp_avg'"
            with pytest.raises(RuntimeError, match=message):
                state.step()


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("maximize", [True, False])
def test_adam_follows_torch_fused(generator: torch.Generator, decoupled: bool, maximize: bool) -> None:
    count = 40_001
    hyper = {"lr": 1e-3, "decoupled": float(decoupled), "maximize": float(maximize)}
    state = ADAM.state(generator, count, [(0, count)], [hyper], scale=1.0)
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
        state.hyper = torch.tensor([ADAM.row(**hyper, step=step)], dtype=torch.float64)
        state.step()
    assert (weight - start).norm() > 1
    assert (state.master - weight).norm() / weight.norm() <= 1e-6
    assert (state.master - truth).norm() <= 1.1 * (weight - truth).norm()
    torch.testing.assert_close(state.exp_avg, peer.state[weight]["exp_avg"], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(state.exp_avg_sq, peer.state[weight]["exp_avg_sq"], rtol=1e-5, atol=1e-9)


def test_lambs_norm_is_that_of_the_step(isa: str, generator: torch.Generator) -> None:
    """Of steps of 1 from where they lead to powers of two, so that differences are exact."""
    state = LAMB.state(generator, 3000, [(0, 3000)], [{"lr": 1.0, "trust_ratio": 1.0}])
    found = float(ops.squared_norm_value(state.norms()[0, 1]))
    before = state.master.double()
    state.step()
    assert abs(found - float((state.master - before).square().sum())) <= 1e-5 * found


def test_what_is_not_finite_shows_in_its_own_norms(generator: torch.Generator) -> None:
    state = LAMB.state(generator, 40, [(0, 20), (20, 40)], [{}, {"trust_ratio": NAN}])
    state.grad[3] = NAN
    values = [[float(ops.squared_norm_value(each)) for each in norms] for norms in state.norms()]
    assert values[0][0] > 0 and values[0][1] != values[0][1] and min(values[1]) > 0
    state.step()
    assert state.master[:20].isnan().nonzero().tolist() == [[3]] and state.master[20:].isnan().all()


def test_zero_has_the_norm_zero(isa: str) -> None:
    state = LAMB.state(torch.Generator(), 40, [(0, 40)], [{}])
    for name in (*LAMB.values, "grad"):
        getattr(state, name).zero_()
    assert not state.norms().any()
    state.step()
    assert not state.master.any()


@pytest.mark.parametrize(
    "norms",
    [torch.zeros(1, 2, 33), torch.zeros(2, 2, 33, dtype=torch.int64), torch.zeros(2, 33, dtype=torch.int64)],
    ids=["dtype", "segments", "dimensions"],
)
def test_refuses_wrong_norms(generator: torch.Generator, norms: Tensor) -> None:
    with pytest.raises(RuntimeError, match=r"lamb_norms_: argument 'norms': expected (dtype|shape)"):
        LAMB.state(generator, 8, [(0, 8)], [{}]).add_norms(norms)


def test_lions_zero_stays_tiny_moves_and_nan_shows(isa: str) -> None:
    count = 40
    state = LION.state(torch.Generator(), count, [(0, count)], [{"weight_decay": 0.0}], scale=1.0)
    state.master, state.exp_avg, state.grad = torch.ones(count), torch.zeros(count), torch.zeros(count)
    state.grad[3], state.exp_avg[4] = -0.0, -0.0
    state.grad[5], state.grad[6] = 1e-30, -1e-30
    state.grad[7], state.grad[8] = NAN, -INF
    state.step()
    wanted = torch.ones(count)
    wanted[5], wanted[6], wanted[7], wanted[8] = 0.99, 1.01, NAN, 1.01
    assert torch.equal(state.master.nan_to_num(7), wanted.nan_to_num(7))
    assert state.exp_avg.isnan().nonzero().tolist() == [[7]]
