"""The backend "flex": torch's FlexAttention over our layouts, against float64 and against our kernels.

On the CPU torch computes FlexAttention without its tables and refuses its backward. So the tables are held
to the layout here, and its backward is let through.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention as torch_flex

from tests.attention.strategies import policies
from tests.attention.test_sparse_self_attention import HEADS, reference, same, tensors
from zero_ext import ConfigError, ZeroConfig
from zero_ext.attention import BlockLayout, SparseSelfAttention, build_layout
from zero_ext.attention.flex_attention import TILE, block_mask
from zero_ext.config.sparse_attention import SparseAttentionConfig

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture(autouse=True)
def backward_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch refuses it there, but its formulas serve every device."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)


def allowed_by(layout: BlockLayout, causal: bool) -> torch.Tensor:
    """Bool [layout heads, queries, keys]."""
    dense = layout.dense_mask()
    last = layout.key_length - layout.query_length
    return dense.tril(last) if causal else dense


@pytest.mark.parametrize(
    "policy, length, causal, key_heads, masked",
    [
        ({"mode": "bigbird", "different_layout_per_head": True}, 300, False, 4, True),
        ({"mode": "fixed", "block": 32, "attention": "unidirectional"}, 200, False, 2, False),
        ({"mode": "variable", "block": 128, "num_random_blocks": 1}, 290, True, 1, True),
        ({"mode": "local_sliding_window", "block": 64}, 256, False, 4, False),
    ],
)
def test_it_is_attention_over_the_layout(
    policy: dict[str, Any], length: int, causal: bool, key_heads: int, masked: bool
) -> None:
    inputs = tensors(length, key_heads=key_heads)
    padding = torch.rand(2, 1, 1, length) < 0.8
    bias = torch.randn(1, HEADS, 1, length)
    bias[..., 0] = torch.finfo(torch.float32).min
    masks = {"key_padding": padding[:, 0, 0], "bias": bias} if masked else {}
    attention = SparseSelfAttention(policy, backend="flex")
    found = attention(*inputs, is_causal=causal, enable_gqa=True, **masks)
    kernel = SparseSelfAttention(policy)(*inputs, is_causal=causal, enable_gqa=True, **masks)
    torch.testing.assert_close(found, kernel, rtol=1e-4, atol=1e-5)
    assert attention.policy is not None
    causal = causal or attention.policy.unidirectional
    allowed = allowed_by(build_layout(attention.policy, HEADS, length, causal=causal), causal)
    if masked:
        allowed = allowed & padding & (bias > -1e38)
    same(found, reference(*inputs, allowed, bias if masked else 0.0), inputs)


def named(count: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Bool [heads, query tiles, key tiles]: the first `count` of each row's columns."""
    first = torch.arange(columns.shape[3]) < count[..., None]
    return torch.zeros_like(columns, dtype=torch.bool).scatter_(3, columns.long(), first)[0]


@settings(deadline=None, max_examples=40)
@given(policies(), st.integers(1, 900), st.booleans(), st.data())
def test_tables_name_the_tiles_that_hold_an_allowed_pair(
    policy: SparseAttentionConfig, keys: int, causal: bool, data: st.DataObject
) -> None:
    queries = data.draw(st.integers(1, keys)) if causal or policy.unidirectional else None
    causal = causal or policy.unidirectional
    layout = build_layout(policy, HEADS, keys, queries=queries, causal=causal)
    mask = block_mask(layout, causal)
    assert mask.BLOCK_SIZE == (TILE, TILE) and mask.seq_lengths == (layout.query_length, keys)
    ends = (0, -keys % TILE, 0, -layout.query_length % TILE)
    allowed = allowed_by(layout, causal)
    cut = torch.nn.functional.pad(allowed, ends).unfold(1, TILE, TILE).unfold(2, TILE, TILE)
    some, every = cut.flatten(3).any(3), cut.flatten(3).all(3)
    assert mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None
    full = named(mask.full_kv_num_blocks, mask.full_kv_indices)
    partial = named(mask.kv_num_blocks, mask.kv_indices)
    assert not bool((full & partial).any())
    assert torch.equal(full | partial, some)
    inside = torch.zeros_like(full)
    inside[:, : layout.query_length // TILE, : keys // TILE] = True
    assert torch.equal(full & inside, every & inside)


@pytest.mark.parametrize("queries", [40, 129])
def test_the_last_queries_alone(queries: int) -> None:
    policy = SparseAttentionConfig(mode="fixed", attention="unidirectional")
    query, key, value = inputs = tensors(200)
    last_rows = (query[:, :, -queries:], key, value)
    found = SparseSelfAttention(policy, backend="flex")(*last_rows, is_causal=True)
    same(found, SparseSelfAttention(policy)(*last_rows, is_causal=True), inputs)


def test_a_query_without_keys_gets_zeros() -> None:
    mask = torch.tensor([[True, False, False], [False, False, False], [True, True, True]])
    layout = BlockLayout.from_block_mask(mask, 16, query_length=44, key_length=44)
    inputs = tensors(44)
    padding = torch.ones(2, 44, dtype=torch.bool)
    padding[1] = False
    found = SparseSelfAttention(layout, backend="flex")(*inputs, key_padding=padding)
    assert not found[0, :, 16:32].any() and not found[1].any() and bool(found[0, :, :16].any())
    same(found, SparseSelfAttention(layout)(*inputs, key_padding=padding), inputs)


def test_what_flex_attention_cannot_do_is_named() -> None:
    attention, inputs = SparseSelfAttention({"mode": "dense"}, backend="flex"), tensors(20)
    with pytest.raises(ValueError, match=r'dropout_p: expected 0 for backend "flex", got 0\.1'):
        attention(*inputs, dropout_p=0.1)
    bias = torch.zeros(1, 1, 20, 20, requires_grad=True)
    with pytest.raises(ValueError, match="bias: expected one without a gradient"):
        attention(*inputs, bias=bias)
    with torch.no_grad():
        attention(*inputs, bias=bias)
    with pytest.raises(ValueError, match='backend: expected "kernel" or "flex", got \'flash\''):
        SparseSelfAttention({"mode": "dense"}, backend="flash")  # type: ignore[arg-type]


def test_a_policy_names_its_backend_and_an_argument_goes_before_it() -> None:
    inputs = tensors(40)
    for config, argument, wanted in (
        ({"mode": "dense"}, None, "kernel"),
        ({"mode": "dense", "backend": "flex"}, None, "flex"),
        ({"mode": "dense", "backend": "flex"}, "kernel", "kernel"),
        (SparseAttentionConfig(mode="dense"), "flex", "flex"),
    ):
        attention = SparseSelfAttention(config, argument)  # type: ignore[arg-type]
        assert attention.policy is not None
        assert attention.backend == attention.policy.backend == wanted
        refused = pytest.raises(ValueError, match="dropout_p") if wanted == "flex" else nullcontext()
        with refused:
            attention(*inputs, dropout_p=0.5)
    with pytest.raises(ConfigError, match=r"sparse_attention\.backend"):
        ZeroConfig.from_mapping({"sparse_attention": {"backend": "flash"}})


def test_more_tiles_than_the_tables_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero_ext.attention.flex_attention.MOST_TILES", 3)
    layout = build_layout(SparseAttentionConfig(mode="dense"), 1, 129)
    with pytest.raises(ValueError, match=r"expected at most 3 tiles .* got 4"):
        SparseSelfAttention(layout, backend="flex")
    SparseSelfAttention(layout)
    with pytest.raises(ValueError, match=r"expected at most 3 tiles of 128 by 128 tokens .* got 4"):
        SparseSelfAttention({"mode": "dense"}, backend="flex")(*tensors(129))


def test_tables_are_made_once_and_go_with_their_layout() -> None:
    layout = build_layout(SparseAttentionConfig(mode="bigbird"), 1, 300)
    assert block_mask(layout, False) is block_mask(layout, False)
    assert block_mask(layout, False) is not block_mask(layout, True)
    gone = weakref.ref(block_mask(layout, False))
    del layout
    gc.collect()
    assert gone() is None


def test_modules_are_copied_and_pickled_with_their_backend() -> None:
    attention, inputs = SparseSelfAttention({"mode": "fixed"}, backend="flex"), tensors(70)
    wanted = attention(*inputs)
    for each in (copy.deepcopy(attention), pickle.loads(pickle.dumps(attention))):
        assert each.backend == "flex" and torch.equal(each(*inputs), wanted)


def test_tensors_without_data() -> None:
    shells = [torch.empty(2, HEADS, 70, 16, device="meta") for _ in range(3)]
    assert SparseSelfAttention({"mode": "fixed"}, backend="flex")(*shells).shape == (2, HEADS, 70, 16)
