"""adam_step_8bit_ against a float64 reference, against fp32 moments, and on bad input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.ops.blockwise_reference import BLOCK, allowed_error, decode
from tests.ops.helpers import FLOAT_DTYPES, available_isas
from tests.ops.optimizer_steps import ADAM, ADAM_8BIT, SEGMENTS, State8, assert_near, reference
from zero_ext import ops

COUNT = 1413


def moments_of(state: State8) -> tuple[Tensor, Tensor]:
    """Both moments in float64, decoded by the reference."""
    first = decode(state.exp_avg_codes.numpy(), state.exp_avg_scales.double().numpy(), True)
    second = decode(state.exp_avg_sq_codes.numpy(), state.exp_avg_sq_scales.double().numpy(), False)
    return torch.from_numpy(first), torch.from_numpy(second)


@pytest.mark.parametrize("param", [None, *FLOAT_DTYPES])
@pytest.mark.parametrize("grad", FLOAT_DTYPES)
def test_matches_float64_reference(
    isa: str, generator: torch.Generator, grad: torch.dtype, param: torch.dtype | None
) -> None:
    state = ADAM_8BIT.state(generator, COUNT, grad=grad, param=param)
    before = state.clone()
    plain = ADAM.state(generator, COUNT)
    plain.master, plain.grad, plain.grad_scale = before.master, before.grad, before.grad_scale
    plain.exp_avg, plain.exp_avg_sq = moments_of(before)
    master, exp_avg, exp_avg_sq = reference(plain).values.values()
    state.step()

    assert_near(state.master, master, "master")
    inside = torch.zeros(COUNT, dtype=torch.bool)
    for begin, end in SEGMENTS:
        inside[begin:end] = True
    assert torch.equal(state.master[~inside], before.master[~inside])
    if param is not None:
        assert state.param is not None
        assert torch.equal(state.param[inside], state.master[inside].to(param))
        assert state.param[~inside].isnan().all()

    for exact, quantized, signed in (
        (exp_avg.numpy(), state.exp_avg(), True),
        (exp_avg_sq.numpy(), state.exp_avg_sq(), False),
    ):
        scales = quantized.scales.double().numpy()
        error = np.abs(decode(quantized.codes.numpy(), scales, signed) - exact)
        assert (error <= allowed_error(exact, scales, signed) + 4e-6 * (1 + np.abs(exact))).all()
    # Elements 1000 and up lie in no segment, so the blocks from 1024 on stay bit for bit.
    assert torch.equal(state.exp_avg_codes[1024:], before.exp_avg_codes[1024:])
    assert torch.equal(state.exp_avg_sq_codes[1024:], before.exp_avg_sq_codes[1024:])
    assert torch.equal(state.exp_avg_scales[4:], before.exp_avg_scales[4:])
    # A scale is the largest magnitude of its block, which may be that of an element in no segment.
    sizes, sizes_before = state.exp_avg_scales[:4].abs(), before.exp_avg_scales[:4].abs()
    largest = exp_avg[: 4 * BLOCK].abs().view(4, BLOCK).amax(1)
    assert torch.equal(sizes != sizes_before, largest != sizes_before.double())


def test_one_pass_equals_the_separate_ops(generator: torch.Generator) -> None:
    state = ADAM_8BIT.state(generator, COUNT, grad=torch.bfloat16, param=torch.bfloat16)
    exp_avg = ops.dequantize_blockwise(state.exp_avg(), True)
    exp_avg_sq = ops.dequantize_blockwise(state.exp_avg_sq(), False)
    wanted = state.clone()
    rest = (wanted.grad, wanted.param, wanted.segments, wanted.hyper, wanted.grad_scale)
    ops.adam_step_(wanted.master, exp_avg, exp_avg_sq, *rest)
    state.step()
    assert torch.equal(state.master, wanted.master)
    touched = 4 * BLOCK
    for quantized, values, signed in (
        (state.exp_avg(), exp_avg, True),
        (state.exp_avg_sq(), exp_avg_sq, False),
    ):
        again = ops.quantize_blockwise(values[:touched], signed)
        assert torch.equal(quantized.codes[:touched], again.codes)
        assert torch.equal(quantized.scales[:4], again.scales)


def test_does_not_depend_on_instruction_set_threads_or_chunks(generator: torch.Generator) -> None:
    count = 100_003
    segments = [(0, 70_000), (70_010, count)]
    start = ADAM_8BIT.state(
        generator, count, segments, ADAM.rows[:2], grad=torch.bfloat16, param=torch.float16
    )
    results = []
    threads = torch.get_num_threads()
    for name in available_isas():
        before = ops.set_isa(name)
        for number in (1, 3):
            torch.set_num_threads(number)
            state = start.clone()
            state.step()
            results.append(state)
        ops.set_isa(before)
    torch.set_num_threads(threads)
    chunked = start.clone()
    for begin in range(0, count, 77 * BLOCK):
        end = min(begin + 77 * BLOCK, count)
        bounds = [
            (min(max(a - begin, 0), end - begin), min(max(b - begin, 0), end - begin)) for a, b in segments
        ]
        elements, blocks = slice(begin, end), slice(begin // BLOCK, -(-end // BLOCK))
        cut = {"segments": torch.tensor(bounds), "hyper": chunked.hyper, "grad_scale": chunked.grad_scale}
        for name, tensor in chunked.named().items():
            if name not in cut:
                assert tensor is not None
                cut[name] = tensor[blocks if name.endswith("_scales") else elements]
        State8(ADAM, **cut).step()
    for other in [*results[1:], chunked]:
        assert results[0].differing(other) == []


def zero_state(count: int, code: int, scale: float) -> State8:
    """Weights and moments of zero, by this code of the first ones and with this scale."""
    state = ADAM_8BIT.state(torch.Generator(), count, [(0, count)], [{}], scale=1.0)
    state.master.zero_()
    state.exp_avg_codes.fill_(code)
    state.exp_avg_sq_codes.zero_()
    state.exp_avg_scales.fill_(scale)
    state.exp_avg_sq_scales.fill_(scale)
    return state


def test_moments_start_from_zero_bytes_or_from_the_code_of_zero(isa: str) -> None:
    count = 300
    zero_bytes, zero_code = (zero_state(count, *each) for each in ((0, 0.0), (127, 5.0)))
    for state in (zero_bytes, zero_code):
        state.master, state.grad = torch.ones(count), torch.linspace(-1, 1, count)
        state.hyper = torch.tensor([ADAM.row(step=1, weight_decay=0, lr=0.1)], dtype=torch.float64)
    zero_bytes.step()
    zero_code.step()
    assert zero_bytes.differing(zero_code) == []
    # Adam's first step is lr in the gradient's direction.
    torch.testing.assert_close(zero_bytes.master, 1 - 0.1 * torch.linspace(-1, 1, count).sign())


def test_rare_small_gradients_do_not_blow_up_the_step(generator: torch.Generator) -> None:
    """Next to a large neighbor a small second moment is far below the smallest code. As zero it would leave
    the next denominator to the newest gradient alone, which makes steps up to 30 times too long."""
    state = zero_state(BLOCK, 127, 0.0)
    for step in range(1, 21):
        state.grad = 1e-4 * (1 + 0.1 * torch.randn(BLOCK, generator=generator))
        state.grad[0] = 1.0
        state.hyper = torch.tensor([ADAM.row(lr=1.0, step=step, weight_decay=0)], dtype=torch.float64)
        last = state.master.clone()
        state.step()
        assert (state.master - last).abs().max() <= 1.5


def test_nan_spoils_its_block_and_no_other(isa: str, generator: torch.Generator) -> None:
    state = ADAM_8BIT.state(generator, COUNT, [(0, COUNT)], [{}])
    state.grad[300] = float("nan")
    state.step()
    for quantized, signed in ((state.exp_avg(), True), (state.exp_avg_sq(), False)):
        values = ops.dequantize_blockwise(quantized, signed)
        assert values[256:512].isnan().all()
        assert values[:256].isfinite().all() and values[512:].isfinite().all()
    state.step()
    assert state.master[256:512].isnan().all()
    assert state.master[:256].isfinite().all() and state.master[512:].isfinite().all()


def test_refuses_shared_memory_by_name(generator: torch.Generator) -> None:
    state = ADAM_8BIT.state(generator, 300, [(0, 300)], [{}])
    for name, other in [
        ("exp_avg_sq_codes", state.exp_avg_codes),
        ("exp_avg_sq_scales", state.exp_avg_scales),
        ("grad", state.master),
        ("exp_avg_codes", state.master.view(torch.uint8)[:300]),
    ]:
        with pytest.raises(RuntimeError, match=r"adam_step_8bit_: argument .*: expected its own memory"):
            state.replaced(**{name: other}).step()
