"""SparseSelfAttention against float64 attention with a dense mask, for every argument that it takes."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from typing_extensions import get_type_hints

from tests.attention.strategies import SEEDS, policies
from zero_ext.attention import BlockLayout, SparseSelfAttention, build_layout
from zero_ext.attention.sparse_self_attention import MoreMasks
from zero_ext.config.sparse_attention import SparseAttentionConfig

HEADS, DIM = 4, 16


def tensors(
    length: int, keys: int | None = None, key_heads: int = HEADS, batch: int = 2
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    keys = length if keys is None else keys
    query = torch.randn(batch, HEADS, length, DIM, requires_grad=True)
    key, value = (torch.randn(batch, key_heads, keys, DIM, requires_grad=True) for _ in range(2))
    return query, key, value


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    allowed: torch.Tensor,
    bias: torch.Tensor | float = 0.0,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention in float64; queries that may attend to nothing get zeros."""
    key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for each in (key, value))
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = query.double() @ key.double().transpose(2, 3) * factor + bias
    scores = scores.masked_fill(~allowed, -math.inf)
    empty = (scores == -math.inf).all(dim=3, keepdim=True)
    return torch.softmax(scores.masked_fill(empty, 0), dim=3).masked_fill(empty, 0) @ value.double()


def same(found: torch.Tensor, wanted: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> None:
    """Values and gradients, of which none may be NaN."""
    weight = torch.randn_like(found)
    got = torch.autograd.grad((found * weight).sum(), inputs)
    right = torch.autograd.grad((wanted * weight).sum(), inputs)
    for one, other in zip((found, *got), (wanted, *right), strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), rtol=1e-4, atol=1e-5)


@settings(deadline=None, max_examples=40)
@given(policies(), st.integers(1, 150), st.booleans(), st.sampled_from((1, 2, 4)), SEEDS)
def test_every_policy(
    policy: SparseAttentionConfig, length: int, causal: bool, key_heads: int, seed: int
) -> None:
    torch.manual_seed(seed)
    inputs = tensors(length, key_heads=key_heads)
    found = SparseSelfAttention(policy)(*inputs, is_causal=causal, enable_gqa=True)
    allowed = build_layout(policy, HEADS, length).dense_mask()
    if causal or policy.unidirectional:
        allowed = allowed & torch.ones(length, length, dtype=torch.bool).tril()
    same(found, reference(*inputs, allowed), inputs)


@pytest.mark.parametrize("kind", ["bool", "float", "padding", "key_padding", "bias", "heads", "all"])
@pytest.mark.parametrize("causal", [False, True])
def test_masks(kind: str, causal: bool) -> None:
    length = 70
    attention, inputs = SparseSelfAttention({"mode": "dense", "block": 32}), tensors(length)
    square = torch.rand(2, 1, length, length) < 0.8
    padding = torch.rand(2, length) < 0.7
    bias = torch.randn(1, HEADS, 1, length, requires_grad=True)
    allowed = torch.ones(length, length, dtype=torch.bool).tril() if causal else torch.tensor(True)
    more: dict[str, Any] = {}
    shift: torch.Tensor | float = 0.0
    if kind in ("bool", "all"):
        more["attn_mask"], allowed = square, allowed & square
    if kind == "heads":
        more["attn_mask"] = torch.rand(HEADS, length, length) < 0.5
        allowed = allowed & more["attn_mask"]
    if kind == "float":
        more["attn_mask"] = shift = torch.randn(length, length)
    if kind == "padding":
        more["attn_mask"], allowed = padding[:, None, None], allowed & padding[:, None, None]
    if kind in ("key_padding", "all"):
        more["key_padding"], allowed = padding, allowed & padding[:, None, None]
    if kind in ("bias", "all"):
        more["bias"] = shift = bias
    found = attention(*inputs, is_causal=causal, scale=0.3, **more)
    leaves = (*inputs, bias) if kind in ("bias", "all") else inputs
    allowed = allowed.expand(2, HEADS, length, length)
    same(found, reference(*inputs, allowed, shift, 0.3), leaves)


@settings(deadline=None, max_examples=40)
@given(st.data(), st.integers(1, 150), st.booleans(), SEEDS)
def test_the_last_queries_alone(data: st.DataObject, keys: int, with_bias: bool, seed: int) -> None:
    """As when generating: the same as the last rows of all, gradients too."""
    torch.manual_seed(seed)
    policy = data.draw(policies(data.draw(st.booleans())))
    queries = data.draw(st.integers(1, keys))
    attention = SparseSelfAttention(policy)
    inputs = tensors(keys)
    bias = torch.randn(2, HEADS, keys, keys) if with_bias else None
    full = attention(*inputs, is_causal=True, bias=bias)[:, :, keys - queries :]
    last_rows = attention(
        inputs[0][:, :, keys - queries :],
        *inputs[1:],
        is_causal=True,
        bias=None if bias is None else bias[:, :, keys - queries :],
    )
    assert last_rows.shape == full.shape
    same(last_rows, full, inputs)


def test_it_is_torchs_function_where_every_block_is_there() -> None:
    inputs = tensors(90)
    mask = torch.rand(2, 1, 90, 90) < 0.9
    mask |= torch.eye(90, dtype=torch.bool)
    for values in ({"attn_mask": mask}, {"is_causal": True}, {"scale": 0.1}):
        found = SparseSelfAttention({"mode": "dense"})(*inputs, **values)
        same(found, scaled_dot_product_attention(*inputs, **values), inputs)


def test_a_query_without_keys_gets_zeros() -> None:
    mask = torch.tensor([[True, False, False], [False, False, False], [True, True, True]])
    attention = SparseSelfAttention(BlockLayout.from_block_mask(mask, 16, query_length=44, key_length=44))
    inputs = tensors(44)
    padding = torch.ones(2, 44, dtype=torch.bool)
    padding[1] = False
    found = attention(*inputs, key_padding=padding)
    assert not found[0, :, 16:32].any()
    assert not found[1].any()
    assert bool(found[0, :, :16].any())
    for gradient in torch.autograd.grad(found.sum(), inputs):
        assert bool(gradient.isfinite().all())


def test_layouts_of_your_own() -> None:
    mask = torch.rand(HEADS, 3, 3) < 0.5
    layout = BlockLayout.from_block_mask(mask, 32, query_length=80, key_length=80)
    attention, inputs = SparseSelfAttention(layout), tensors(80)
    same(attention(*inputs), reference(*inputs, layout.dense_mask()), inputs)
    with pytest.raises(ValueError, match=r"layout: expected 80 queries and 80 keys.*, got 96 and 96"):
        attention(*tensors(96))
    with pytest.raises(ValueError, match=r"layout: expected 1 head or 2 heads.*, got 4"):
        attention(*(each[:, :2] for each in inputs))
    assert "80 × 80" in repr(attention)


def test_dropout_is_drawn_by_torch() -> None:
    attention, inputs = SparseSelfAttention({"mode": "dense"}), tuple(t.detach() for t in tensors(64))
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(attention(*inputs, dropout_p=0.5))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    plain = attention(*inputs)
    mean = torch.stack([attention(*inputs, dropout_p=0.3) for _ in range(200)]).mean(dim=0)
    assert float((mean - plain).abs().mean()) < 0.1 * float(plain.abs().mean()) + 0.05


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            {"query": torch.randn(2, HEADS, DIM)},
            ValueError,
            r"query: expected shape \[batch.*, got \(2, 4, 16\)",
        ),
        ({"value": torch.randn(2, HEADS, 33, DIM)}, ValueError, "value: expected the shape of key"),
        (
            {"query": torch.randn(3, HEADS, 32, DIM)},
            ValueError,
            "key: expected the batch and head dim of query",
        ),
        (
            {"query": torch.randn(2, 8, 32, DIM)},
            ValueError,
            "key: expected 8 heads.*, got 4.*enable_gqa=True",
        ),
        (
            {"query": torch.randn(2, 6, 32, DIM), "enable_gqa": True},
            ValueError,
            "key: expected .* divides the 6 of the query, got 4",
        ),
        ({"query": torch.randn(2, HEADS, 31, DIM)}, ValueError, "query: expected length 32.*, got 31"),
        (
            {"query": torch.randn(2, HEADS, 33, DIM), "is_causal": True},
            ValueError,
            "query: expected length 32.*, got 33",
        ),
        (
            {"attn_mask": torch.ones(2, 32, dtype=torch.bool)},
            ValueError,
            "attn_mask: expected a shape that broadcasts .*key_padding",
        ),
        (
            {"attn_mask": torch.ones(1, 1, 1, 1, 32)},
            ValueError,
            r"attn_mask: expected a shape that broadcasts .*, got \(1, 1, 1, 1, 32\)",
        ),
        (
            {"attn_mask": torch.ones(32, 32, dtype=torch.long)},
            TypeError,
            "attn_mask: expected .*, got torch.int64",
        ),
        ({"key_padding": torch.ones(2, 31, dtype=torch.bool)}, ValueError, r"shape \(2, 32\)"),
        ({"key_padding": torch.ones(2, 32)}, ValueError, "key_padding: expected .*, got torch.float32"),
        (
            {"bias": torch.ones(32, 32, dtype=torch.bool)},
            TypeError,
            "bias: expected a float dtype, got torch.bool",
        ),
        ({"rpe": torch.ones(32, 32)}, TypeError, "expected keywords among .*, got 'rpe'"),
        (
            dict.fromkeys(("query", "key", "value"), torch.ones(2, HEADS, 32, 0)),
            ValueError,
            r"query: expected a head dim of at least 1, got shape \(2, 4, 32, 0\)",
        ),
    ],
)
def test_what_does_not_fit(change: dict[str, Any], error: type[Exception], words: str) -> None:
    names = dict(zip(("query", "key", "value"), tensors(32), strict=True))
    with pytest.raises(error, match=words):
        SparseSelfAttention({"mode": "dense"})(**{**names, **change})


@pytest.mark.parametrize("dim", [1, 8, 20, 36, 250])
@pytest.mark.parametrize("queries", [40, 7])
def test_head_dims_that_the_kernels_do_not_have(dim: int, queries: int) -> None:
    inputs = (torch.randn(2, HEADS, queries, dim), *(torch.randn(2, HEADS, 40, dim) for _ in range(2)))
    for each in inputs:
        each.requires_grad_()
    allowed = torch.ones(queries, 40, dtype=torch.bool).tril(40 - queries)
    for scale in (None, 0.02):
        found = SparseSelfAttention({"mode": "dense"})(*inputs, is_causal=True, scale=scale)
        same(found, reference(*inputs, allowed, scale=scale), inputs)


@pytest.mark.parametrize("dim", [257, 264])
def test_head_dims_out_of_range(dim: int) -> None:
    inputs = (torch.randn(1, 1, 16, dim) for _ in range(3))
    with pytest.raises(RuntimeError, match=rf"head dim.*{dim}|{dim}.*head dim"):
        SparseSelfAttention({"mode": "dense"})(*inputs)


@pytest.mark.parametrize("own", [False, True])
def test_a_length_that_was_evaluated_first_trains(own: bool) -> None:
    inputs = tensors(80)
    with torch.inference_mode():
        config: Any = {"mode": "fixed", "block": 32}
        if own:
            config = BlockLayout.from_block_mask(torch.rand(3, 3) < 0.6, 32, query_length=80, key_length=80)
        attention = SparseSelfAttention(config)
        evaluated = attention(*inputs)
    trained = attention(*inputs)
    assert torch.equal(trained, evaluated)
    trained.sum().backward()
    assert all(each.grad is not None for each in inputs)


def test_lazily_made_layout_tensors_may_be_saved_for_backward() -> None:
    layout = BlockLayout.from_block_mask(torch.eye(3, dtype=torch.bool), 32)
    with torch.inference_mode():
        tensors = (layout.column_pointers, layout.rows, layout.to("meta").columns)
    assert not any(tensor.is_inference() for tensor in tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_accepts_inputs_of_several_dtypes(dtype: torch.dtype) -> None:
    attention, (query, key, value) = SparseSelfAttention({"mode": "dense"}), tensors(40)
    half = value.detach().to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype):
        found = attention(query, key, half)
        wanted = scaled_dot_product_attention(query, key, half)
        with torch.autocast("cpu", enabled=False):
            assert attention(query, key, value).dtype == torch.float32
    assert found.dtype == wanted.dtype == dtype
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.02)
    leaves = (query, key, half)
    for gradient, leaf in zip(torch.autograd.grad(found.sum(), leaves), leaves, strict=True):
        assert gradient.dtype == leaf.dtype


def test_fewer_queries_are_the_last_tokens() -> None:
    inputs = tensors(13, 45)
    wanted = scaled_dot_product_attention(*inputs, attn_mask=causal_lower_right(13, 45))
    same(SparseSelfAttention({"mode": "dense"})(*inputs, is_causal=True), wanted, inputs)
    own = SparseSelfAttention(
        BlockLayout.from_block_mask(torch.ones(1, 3, dtype=torch.bool), 16, query_length=13, key_length=45)
    )
    torch.testing.assert_close(own(*inputs, is_causal=True), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", [None, "fixed", ["fixed"], SparseAttentionConfig])
def test_what_is_no_configuration(config: Any) -> None:
    with pytest.raises(TypeError, match=r"config: expected a SparseAttentionConfig, a mapping"):
        SparseSelfAttention(config)


def test_every_argument_has_a_type() -> None:
    hints = get_type_hints(SparseSelfAttention.forward)
    assert get_args(hints["more"]) == (MoreMasks,)
    assert set(get_type_hints(MoreMasks).values()) == {torch.Tensor | None}


def givers() -> dict[str, SparseSelfAttention]:
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    return {
        "policy": SparseSelfAttention({"mode": "fixed", "block": 16, "attention": "unidirectional"}),
        "own": SparseSelfAttention(BlockLayout.from_block_mask(mask, 16, query_length=70, key_length=70)),
    }


@pytest.mark.parametrize("name", ["policy", "own"])
@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("seen", [False, True])
def test_tensors_without_data(name: str, device: str, seen: bool) -> None:
    """Meta and fake tensors give shapes, and calls with real ones after them are what they were."""
    attention, (query, key, value) = givers()[name], tensors(70)
    wanted = givers()[name](query, key, value, is_causal=True)
    if seen:
        attention(query, key, value, is_causal=True)
    with torch.device("meta") if device == "meta" else FakeTensorMode():
        shells = [torch.empty(2, HEADS, 70, DIM, device=device, requires_grad=True) for _ in range(3)]
        found = attention(*shells, is_causal=True)
        gradients = torch.autograd.grad(found.sum(), shells)
    assert found.is_meta or isinstance(found, FakeTensor)
    assert {each.shape for each in (found, *gradients)} == {query.shape}
    assert {each.device.type for each in (found, *gradients)} == {device}
    assert torch.equal(attention(query, key, value, is_causal=True), wanted)


@pytest.mark.parametrize("strict", [False, True])
def test_export_treats_the_layout_as_a_constant(strict: bool) -> None:
    attention, inputs = givers()["policy"], tuple(each.detach() for each in tensors(70))
    if strict:  # which has no graph breaks
        attention(*inputs)
    program = torch.export.export(attention, inputs, strict=strict)
    assert torch.equal(program.module()(*inputs), attention(*inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_least_float_hides_a_key(dtype: torch.dtype) -> None:
    """Weights are powers of two, and finfo.min times log2(e) is minus infinity in float32."""
    inputs = tensors(40)
    mask = torch.zeros(40, 40, dtype=dtype)
    mask[:, 7] = mask[3] = torch.finfo(dtype).min
    found = SparseSelfAttention({"mode": "dense"})(*inputs, attn_mask=mask)
    assert not found[:, :, 3].any()
    same(found, reference(*inputs, mask == 0), inputs)


def test_the_least_float_of_16_bits_hides_no_row() -> None:
    query, key, value = (each.detach() for each in tensors(40))
    mask = torch.zeros(40, 40, dtype=torch.float16)
    mask[3] = torch.finfo(torch.float16).min
    found = SparseSelfAttention({"mode": "dense"})(0 * query, key, value, attn_mask=mask)
    torch.testing.assert_close(found[:, :, 3], value.mean(dim=2), rtol=0, atol=0.01)
