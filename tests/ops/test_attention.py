"""Block-sparse attention and its gradients against dense attention in float64, and its memory."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.attention_reference import Case, compressed, dropout_weights, philox, reference, results
from tests.ops.helpers import FLOAT_DTYPES, available_isas
from zero_ext import ops

ROOT = Path(__file__).resolve().parents[2]
TOKENS, HEADS, DIM, THREADS = 8192, 4, 64, 2  # of the call whose memory is measured
ISAS = available_isas()

# Largest error, as a part of the size of the results; of the type's last place a few.
TOLERANCE = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def check(case: Case, generator: torch.Generator) -> None:
    """The op's results against the reference's."""
    grad_output = torch.randn(case.query.shape, generator=generator).to(case.query.dtype)
    found = results(case, grad_output)
    wanted = reference(case, grad_output)
    assert set(found) == set(wanted.values)
    for name, value in found.items():
        exact = wanted.values[name]
        assert value.shape == exact.shape and value.isfinite().all(), name
        error = float((value.double() - exact).abs().max()) if value.numel() else 0.0
        limit = max(TOLERANCE[case.query.dtype], TOLERANCE[value.dtype]) * wanted.sizes[name]
        assert error <= limit, f"{name}: error {error:.2e}, at most {limit:.2e}"


def randn(*shape: int, dtype: torch.dtype = torch.float32, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def plain_case(
    generator: torch.Generator, dtype: torch.dtype = torch.float32, block: int = 16, length: int = 100
) -> Case:
    """Two batches, four heads of two key heads, about half of the blocks."""
    blocks = -(-length // block)
    mask = torch.rand(4, blocks, blocks, generator=generator) < 0.5
    query = randn(2, 4, length, 32, dtype=dtype, generator=generator)
    rows = [randn(2, 2, length, 32, dtype=dtype, generator=generator) for _ in range(2)]
    return Case(query, *rows, mask, block)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Case, str, torch.Generator]:
    """Any call that is allowed, the instruction set it runs with, and more random numbers."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    dtype = draw(st.sampled_from(FLOAT_DTYPES))
    block = draw(st.sampled_from([16, 32, 64, 128]))
    batch, key_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    heads, dim = key_heads * group, 8 * draw(st.integers(2, 10))
    queries, keys = draw(st.integers(1, 200)), draw(st.integers(1, 200))
    shape = (heads if draw(st.booleans()) else 1, -(-queries // block), -(-keys // block))
    mask = torch.rand(*shape, generator=generator) < draw(st.sampled_from([0.2, 0.6, 1.0]))
    case = Case(
        randn(batch, heads, queries, dim, dtype=dtype, generator=generator),
        randn(batch, key_heads, keys, dim, dtype=dtype, generator=generator),
        randn(batch, key_heads, keys, dim, dtype=dtype, generator=generator),
        mask,
        block,
        causal=draw(st.booleans()),
        scale=draw(st.sampled_from([None, None, 0.3, -0.2])),
    )
    if draw(st.booleans()):
        case.key_padding = torch.rand(batch, keys, generator=generator) < 0.8
    if draw(st.booleans()):
        full = (batch, heads, queries, keys)
        sizes = [size if draw(st.booleans()) else 1 for size in full]
        case.bias = randn(*sizes, dtype=draw(st.sampled_from(FLOAT_DTYPES)), generator=generator)
    if draw(st.booleans()):
        case.dropout, case.seed, case.offset = 0.3, draw(st.integers(0, 2**63 - 1)), draw(st.integers(0, 9))
    return case, draw(st.sampled_from(ISAS)), generator


@pytest.fixture(autouse=True)
def widest_isa() -> Iterator[None]:
    """Puts the instruction set back that a test chose."""
    before = ops.get_isa()
    yield
    ops.set_isa(before)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_any_call_equals_dense_attention(drawn: tuple[Case, str, torch.Generator]) -> None:
    case, isa, generator = drawn
    ops.set_isa(isa)
    check(case, generator)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_every_instruction_set_and_block(isa: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    for block in (16, 32, 64, 128):
        case = plain_case(generator, dtype, block, 2 * block + 11)
        check(replace(case, causal=block == 64), generator)


@pytest.mark.parametrize("dim", [16, 96, 200, 256])
def test_head_dims(dim: int, generator: torch.Generator) -> None:
    for dtype in FLOAT_DTYPES:
        rows = [randn(1, 1, 90, dim, dtype=dtype, generator=generator) for _ in range(3)]
        check(Case(*rows, torch.ones(1, 2, 2, dtype=torch.bool), 64), generator)


@pytest.mark.parametrize("sizes", [(1, 4, 1, 100), (2, 1, 100, 1), (1, 1, 100, 100), (1, 1, 1, 1)])
def test_bias_of_any_strides(sizes: tuple[int, ...], generator: torch.Generator) -> None:
    case = plain_case(generator)
    case.bias = randn(*sizes, generator=generator)
    check(case, generator)
    expanded = replace(case, bias=case.bias.expand(2, 4, 100, 100))
    assert torch.equal(expanded.run(), case.run())
    turned = replace(case, bias=case.bias.transpose(2, 3).contiguous().transpose(2, 3))
    assert torch.equal(turned.run(), case.run())


def test_a_bias_of_minus_infinity_hides(generator: torch.Generator) -> None:
    case = plain_case(generator)
    hidden = torch.rand(2, 100, generator=generator) < 0.3
    by_bias = torch.zeros(2, 1, 1, 100).masked_fill(hidden[:, None, None], -math.inf)
    assert torch.allclose(
        replace(case, bias=by_bias).run(), replace(case, key_padding=~hidden).run(), atol=1e-6
    )


def test_gradient_of_the_bias_only_if_it_is_asked_for(generator: torch.Generator) -> None:
    bias = randn(1, 4, 1, 100, generator=generator)
    arguments = replace(plain_case(generator), bias=bias).forward_arguments()
    output, logsumexp = torch.ops.zero_ext.block_sparse_attention_forward(*arguments)
    backward = torch.ops.zero_ext.block_sparse_attention_backward
    rows = (torch.ones_like(output), *arguments[:3], output, logsumexp, *arguments[3:])
    assert backward(*rows, False)[3].numel() == 0
    assert backward(*rows, True)[3].shape == bias.shape


def test_rows_without_keys_are_zeros(isa: str, generator: torch.Generator) -> None:
    for dtype in FLOAT_DTYPES:
        case = plain_case(generator, dtype)
        case.mask[:, 2] = False
        case.mask[0] = False
        case.key_padding = torch.ones(2, 100, dtype=torch.bool)
        case.key_padding[1] = False
        leaves = [each.requires_grad_() for each in (case.query, case.key, case.value)]
        output = case.run()
        output.backward(torch.full_like(output, 7))
        empty = ~case.seen().any(-1).expand(2, 4, 100)
        assert empty[1].all() and empty[0, :, 32:48].all() and not empty[0].all()
        assert (output[empty] == 0).all() and (leaves[0].grad[empty] == 0).all()
        assert (leaves[1].grad[1] == 0).all() and (leaves[2].grad[1] == 0).all()
        assert output.isfinite().all() and all(leaf.grad.isfinite().all() for leaf in leaves)
        with torch.no_grad():
            logsumexp = torch.ops.zero_ext.block_sparse_attention_forward(*case.forward_arguments())[1]
        assert ((logsumexp == -math.inf) == empty).all()


def test_logsumexp(generator: torch.Generator) -> None:
    rows = [randn(1, 2, 70, 16, generator=generator) for _ in range(3)]
    case = Case(*rows, torch.ones(1, 2, 2, dtype=torch.bool), 64, scale=0.5)
    found = torch.ops.zero_ext.block_sparse_attention_forward(*case.forward_arguments())[1]
    exact = (rows[0].double() @ rows[1].double().transpose(-1, -2) * 0.5).logsumexp(-1) / math.log(2)
    assert found.dtype == torch.float32 and torch.allclose(found.double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dim", [16, 64])
def test_large_scores_are_as_exact_as_in_torch(dim: int, generator: torch.Generator) -> None:
    # One row in a hundred has two scores near each other, and all the error: many rows make enough of them.
    rows = [randn(4, 8, 256, dim, generator=generator) * size for size in (32, 32, 1)]
    grad_output = randn(4, 8, 256, dim, generator=generator)
    case = Case(*rows, torch.ones(1, 4, 4, dtype=torch.bool), 64)
    wanted, found = reference(case, grad_output).values, results(case, grad_output)
    leaves = [row.requires_grad_() for row in rows]
    of_torch = torch.nn.functional.scaled_dot_product_attention(*leaves)
    # Few rows make the errors of the other gradients, in which the weights' own cancel or do not.
    peers = {"output": of_torch.detach(), "value": torch.autograd.grad(of_torch, leaves[2], grad_output)[0]}
    for name, peer in peers.items():
        errors = [float((each.double() - wanted[name]).norm()) for each in (found[name], peer)]
        assert errors[0] <= 2 * errors[1], f"{name}: error {errors[0]:.2e}, torch's {errors[1]:.2e}"


def test_scores_without_bounds(isa: str, generator: torch.Generator) -> None:
    """Products that are different multiples of 2^29: the highest has all the weight, however large it is."""
    query = torch.eye(16).repeat(4, 1)[None, None] * 2.0**16
    key = torch.rand(1, 1, 64, 16, generator=generator).argsort(2) * 2.0**13
    value, grad_output = (randn(1, 1, 64, 16, generator=generator) for _ in range(2))
    case = Case(query, key, value, torch.ones(1, 1, 1, dtype=torch.bool), 64)
    wanted, found = reference(case, grad_output).values, results(case, grad_output)
    for name in ("output", "value"):
        assert torch.allclose(found[name].double(), wanted[name], rtol=1e-5, atol=1e-5), name
    assert all(found[name].isfinite().all() for name in ("query", "key"))


def test_empty_tensors(generator: torch.Generator) -> None:
    for shapes in (((0, 2, 20), (0, 2, 20)), ((2, 2, 0), (2, 2, 20)), ((2, 2, 20), (2, 2, 0))):
        query, key, value = [
            randn(*shape, 16, generator=generator).requires_grad_() for shape in (*shapes, shapes[1])
        ]
        mask = torch.ones(1, -(-query.size(2) // 16), -(-key.size(2) // 16), dtype=torch.bool)
        output = Case(query, key, value, mask, 16).run()
        output.sum().backward()
        assert output.shape == query.shape and (output == 0).all()
        assert key.grad.shape == key.shape and (key.grad == 0).all() and (query.grad == 0).all()


def test_inputs_of_any_strides(generator: torch.Generator) -> None:
    def views(shape: tuple[int, ...]) -> Iterator[Tensor]:
        batch, heads, length, dim = shape
        yield randn(batch, length, heads, dim, generator=generator).transpose(1, 2)
        yield randn(batch, heads, dim, length, generator=generator).transpose(2, 3)
        yield randn(batch, 1, length, dim, generator=generator).expand(shape)
        yield randn(batch, heads, length, dim + 5, generator=generator)[..., 3:-2]

    case = plain_case(generator)
    for query, key, value in zip(
        *[views(each.shape) for each in (case.query, case.key, case.key)], strict=True
    ):
        strided = replace(case, query=query, key=key, value=value)
        dense = replace(case, query=query.contiguous(), key=key.contiguous(), value=value.contiguous())
        grad_output = next(views(query.shape))
        found, wanted = results(strided, grad_output), results(dense, grad_output.contiguous())
        assert all(torch.equal(found[name], wanted[name]) for name in found)


def test_a_not_a_number_is_not_hidden(generator: torch.Generator) -> None:
    case = plain_case(generator)
    case.mask[:] = torch.rand(1, 7, 7, generator=generator) < 0.5
    case.mask[:, 0, 1] = True
    case.key[0, 0, 20, 3] = math.nan
    sees = case.mask[0, :, 1].repeat_interleave(16)[:100]
    assert (case.run()[0, :2].isnan().all(-1) == sees).all() and case.run()[1].isfinite().all()


def threaded(case: Case, grad_output: Tensor, threads: int) -> dict[str, Tensor]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return results(case, grad_output)
    finally:
        torch.set_num_threads(before)


def test_the_same_bits_for_any_number_of_threads(isa: str, generator: torch.Generator) -> None:
    for dtype in FLOAT_DTYPES:
        case = plain_case(generator, dtype, 32, 300)
        case.bias = randn(1, 4, 1, 300, generator=generator)
        case.dropout, case.causal = 0.1, True
        case.mask[:, 3] = True  # a row that sees everything among others that do not
        grad_output = randn(2, 4, 300, 32, dtype=dtype, generator=generator)
        wanted = threaded(case, grad_output, 1)
        for threads in (2, 3, 7):
            found = threaded(case, grad_output, threads)
            assert all(torch.equal(found[name], wanted[name]) for name in wanted), threads


@pytest.mark.parametrize("block", [16, 32])
def test_the_same_bits_without_a_bias(isa: str, block: int, generator: torch.Generator) -> None:
    # A key block that shares a panel with the diagonal in one split of the keys, and not in another.
    blocks = -(-300 // block)
    every = torch.ones(1, blocks, blocks, dtype=torch.bool)
    for dtype in FLOAT_DTYPES:
        for key_heads, threads in ((1, 2), (4, 3)):
            query, grad_output = [randn(1, 4, 300, 32, dtype=dtype, generator=generator) for _ in range(2)]
            rows = [randn(1, key_heads, 300, 32, dtype=dtype, generator=generator) for _ in range(2)]
            case = Case(query, *rows, every, block, causal=True)
            wanted, found = [threaded(case, grad_output, each) for each in (1, threads)]
            different = [name for name in wanted if not torch.equal(found[name], wanted[name])]
            assert different == [], f"{dtype}, {key_heads} key heads, {threads} threads"


def test_dropout_depends_on_seed_and_offset_not_on_blocks(isa: str, generator: torch.Generator) -> None:
    rows = [randn(2, 2, 130, 16, generator=generator) for _ in range(2)]
    # With equal scores and the identity as values the output is the mask itself.
    value = torch.eye(130)[:, :128].expand(2, 2, 130, 128).contiguous()
    query, key = [torch.cat([each * 0, each.new_zeros(2, 2, 130, 112)], -1) for each in rows]
    masks = []
    for block in (16, 32, 64, 128):
        mask = torch.ones(1, -(-130 // block), -(-130 // block), dtype=torch.bool)
        case = Case(query, key, value, mask, block, dropout=0.4, seed=77, offset=5)
        masks.append(case.run() != 0)
        assert torch.equal(masks[-1], dropout_weights(case)[..., :128] != 0)
        for other in (replace(case, seed=78), replace(case, offset=6), replace(case, seed=77 + (1 << 40))):
            assert 0.4 < float(((other.run() != 0) == masks[-1]).double().mean()) < 0.64
    share = float(masks[0].double().mean())
    assert abs(share - 0.6) < 5 * math.sqrt(0.24 / masks[0].numel())


def test_the_generator_is_philox() -> None:
    # The known answers of Random123 (Salmon et al. 2011), which csrc/tests checks of the C++ too.
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    found = philox(pi, 0x299F31D0A4093822)
    assert [int(word) for word in found] == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_errors_are_not_above_twice_those_of_torch(
    dtype: torch.dtype, causal: bool, generator: torch.Generator
) -> None:
    rows = [randn(1, 2, 384, 64, dtype=dtype, generator=generator) for _ in range(3)]
    case = Case(*rows, torch.ones(1, 6, 6, dtype=torch.bool), 64, causal=causal)
    grad_output = randn(1, 2, 384, 64, dtype=dtype, generator=generator)
    exact = reference(case, grad_output).values
    leaves = [each.clone().requires_grad_() for each in rows]
    output = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal)
    gradients = torch.autograd.grad(output, leaves, grad_output)
    torchs = dict(zip(("output", "query", "key", "value"), (output, *gradients), strict=True))
    for name, found in results(case, grad_output).items():
        ours, theirs = [
            float((each.detach().double() - exact[name]).square().mean().sqrt())
            for each in (found, torchs[name])
        ]
        assert ours <= 2 * theirs, f"{name}: {ours:.2e} against {theirs:.2e}"


def test_compiled_without_a_break(generator: torch.Generator) -> None:
    case = plain_case(generator)
    layout = compressed(case.mask)
    rows = [each.requires_grad_() for each in (case.query, case.key, case.value)]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return ops.block_sparse_attention(
            query * 1.5, key, value, *layout, block=16, causal=True, dropout=0.1
        )

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    wanted = torch.autograd.grad(attend(*rows).square().sum(), rows)
    found = torch.autograd.grad(compiled(*rows).square().sum(), rows)
    assert torch.equal(compiled(*rows), attend(*rows))
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_a_second_derivative_is_refused(generator: torch.Generator) -> None:
    case = plain_case(generator)
    query = case.query.requires_grad_()
    (first,) = torch.autograd.grad(case.run().square().sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="block_sparse_attention: it has no second derivative"):
        first.sum().backward()


# Prints by how much a forward and backward raise the high-water mark. A short one before pays for what stays.
PROGRAM = f"""
import torch
from benchmarks.harness import process_memory
from tests.ops.attention_reference import compressed
from zero_ext import ops

def rise(tokens, dtype):
    blocks = tokens // 64
    layout = compressed((torch.rand(1, blocks, blocks) < 8 / blocks) | torch.eye(blocks, dtype=torch.bool))
    rows = [torch.randn(1, {HEADS}, tokens, {DIM}).to(dtype).requires_grad_() for _ in range(3)]
    grad_output = torch.randn_like(rows[0])
    process_memory.return_free_pages()
    process_memory.reset_peak()
    before = process_memory.resident_bytes()
    output = ops.block_sparse_attention(*rows, *layout, block=64, causal=True)
    gradients = torch.autograd.grad(output, rows, grad_output)
    return process_memory.peak_bytes() - before

torch.set_num_threads({THREADS})
for dtype in (torch.float32, torch.bfloat16):
    rise(512, dtype)
    print(rise({TOKENS}, dtype))
"""


def documented_bytes(element: int) -> int:
    """Output, logsumexp and gradients; for each thread a head's sums of keys and values, and tiles."""
    rows = HEADS * TOKENS
    results = 4 * rows * DIM * element + 4 * rows
    tiles = 11 * 64 * DIM + 7 * 64 * 64
    return results + THREADS * (8 * TOKENS * DIM + 4 * tiles)


def test_memory_is_what_is_documented() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for element, found in zip((4, 2), done.stdout.split(), strict=True):
        wanted = documented_bytes(element)
        assert abs(int(found) / wanted - 1) < 0.1, f"{element} bytes an element: {found}, documented {wanted}"
