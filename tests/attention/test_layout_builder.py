"""Layouts of every mode against DeepSpeed's and a slow reference, and at lengths that no mask could have."""

from __future__ import annotations

import json
import tracemalloc
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention.record_deepspeed_layouts import FILE
from tests.attention.reference_layout import reference_mask
from tests.attention.strategies import policies
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.attention import BlockLayout, LayoutCache, build_layout
from zero_ext.config.sparse_attention import SparseAttentionConfig

MILLION = 1 << 20


def policy_of(**values: Any) -> SparseAttentionConfig:
    return SparseAttentionConfig.from_mapping(values)


def check_order(layout: BlockLayout) -> None:
    """Pointers rise from head to head, columns within a row, and the transposed copy holds the same."""
    pointers = layout.row_pointers.flatten().long()
    assert pointers[0] == 0
    assert pointers[-1] == layout.blocks
    assert bool((pointers.diff() >= 0).all())
    mask = layout.block_mask()
    assert int(mask.sum()) == layout.blocks
    turned = BlockLayout(
        layout.block,
        layout.heads,
        layout.key_length,
        layout.query_length,
        layout.column_pointers,
        layout.rows,
    )
    assert torch.equal(turned.block_mask(), mask.transpose(1, 2))
    for held in (layout, turned):
        offsets = torch.arange(held.blocks)
        inside = torch.isin(offsets[1:], held.row_pointers.flatten().long(), invert=True)
        assert bool((held.columns.diff() > 0)[inside].all())


@pytest.mark.parametrize("case", json.loads(FILE.read_text()), ids=lambda case: case["settings"]["mode"])
def test_as_deepspeed_has_it(case: dict[str, Any]) -> None:
    """Except that nothing attends to later blocks where attention is unidirectional."""
    blocks, policy = case["blocks"], policy_of(**case["settings"])
    bits = 1 << torch.arange(blocks)
    theirs = (torch.tensor(case["rows"])[..., None] & bits) > 0
    if policy.unidirectional:
        theirs = theirs.tril()
    layout = build_layout(policy, case["heads"], 16 * blocks)
    assert torch.equal(layout.block_mask().expand_as(theirs), theirs)
    assert layout.heads in (1, case["heads"])


@settings(deadline=None, max_examples=50)
@given(policies(), st.integers(1, 5), st.integers(1, 14), st.integers(0, 127))
def test_as_the_reference_has_it(policy: SparseAttentionConfig, heads: int, blocks: int, cut: int) -> None:
    length = blocks * policy.block - cut % policy.block
    layout = build_layout(policy, heads, length)
    check_order(layout)
    wanted = torch.stack([reference_mask(policy, head, blocks) for head in range(heads)])
    assert torch.equal(layout.block_mask().expand_as(wanted), wanted)
    down = build_layout(policy, heads, length, causal=True).block_mask()
    assert torch.equal(down, layout.block_mask().tril())


@settings(deadline=None, max_examples=60)
@given(policies(random_blocks=True), st.integers(1, 3), st.integers(1, 14))
def test_random_blocks_come_on_top(policy: SparseAttentionConfig, heads: int, blocks: int) -> None:
    layout = build_layout(policy, heads, blocks * policy.block)
    check_order(layout)
    plain = policy.replace(num_random_blocks=0)
    base = torch.stack([reference_mask(plain, head, blocks) for head in range(heads)])
    mask = layout.block_mask().expand_as(base)
    more = mask & ~base
    assert bool((mask | ~base).all())
    assert int(more.sum(dim=2).max()) <= policy.random_blocks
    if policy.unidirectional:
        assert torch.equal(mask, mask.tril())
    again = build_layout(policy, heads, blocks * policy.block)
    assert torch.equal(again.columns, layout.columns)


def test_random_blocks_are_spread_and_differ() -> None:
    """4 random blocks in rows of 100: every column as often as another, to five standard deviations."""
    policy = policy_of(mode="bigbird", num_random_blocks=4, num_global_blocks=1, num_sliding_window_blocks=1)
    counts = torch.zeros(100)
    seen = set()
    for seed in range(40):
        mask = build_layout(policy.replace(seed=seed), 1, 1600).block_mask()[0]
        apart = mask[1:].clone()
        apart[torch.arange(99), torch.arange(1, 100)] = False
        counts += apart.sum(dim=0)
        seen.add(tuple(map(int, mask.nonzero().flatten())))
    assert len(seen) == 40
    wanted = 40 * 99 * 4 / 100
    assert float((counts[1:] - wanted).abs().max()) < 5 * wanted**0.5 + 2
    heads = build_layout(policy.replace(different_layout_per_head=True), 3, 1600)
    assert heads.heads == 3
    first, second, _ = heads.block_mask()
    assert not torch.equal(first, second)
    exact = policy_of(mode="variable", num_random_blocks=3, local_window_blocks=[1], global_block_indices=[])
    rows = build_layout(exact.replace(attention="unidirectional"), 1, 1600).block_mask()[0].sum(dim=1)
    assert int(rows[0]) == 1
    assert int(rows.max()) == 4


@on_ranks(2)
def test_random_blocks_are_those_of_the_other_ranks(world: World) -> None:
    policy = policy_of(mode="bigbird", num_random_blocks=3, different_layout_per_head=True, seed=11)
    torch.manual_seed(world.rank)
    columns = build_layout(policy, 2, 5000).columns.tolist()
    assert world.everyone(columns) == [columns] * world.size


@settings(deadline=None, max_examples=80)
@given(st.data(), st.booleans(), st.integers(1, 12), st.integers(0, 6))
def test_a_longer_unidirectional_layout_starts_alike(
    data: st.DataObject, random_blocks: bool, blocks: int, more: int
) -> None:
    """What a token attends to does not change when others follow: keys may be kept while generating."""
    policy = data.draw(policies(random_blocks, attention="unidirectional").filter(lambda p: p.unidirectional))
    short = build_layout(policy, 2, blocks * policy.block).block_mask()
    long = build_layout(policy, 2, (blocks + more) * policy.block).block_mask()
    assert torch.equal(long[:, :blocks, :blocks], short)


@settings(deadline=None, max_examples=60)
@given(st.data(), st.booleans(), st.integers(1, 300))
def test_the_last_rows_alone(data: st.DataObject, random_blocks: bool, length: int) -> None:
    policy = data.draw(policies(random_blocks))
    queries = data.draw(st.integers(1, length))
    full = build_layout(policy, 2, length, causal=True)
    last_rows = build_layout(policy, 2, length, queries=queries, causal=True)
    first = (length - queries) // policy.block
    assert last_rows.query_length == length - first * policy.block
    assert torch.equal(last_rows.block_mask(), full.block_mask()[:, first:])
    check_order(last_rows)


@pytest.mark.parametrize(
    "values",
    [
        {"mode": "fixed", "block": 64, "num_local_blocks": 128},
        {"mode": "bigbird", "block": 64, "num_random_blocks": 3},
        {"mode": "bslongformer", "block": 64},
        {"mode": "local_sliding_window", "block": 16, "num_sliding_window_blocks": 9},
        {"mode": "variable", "block": 64, "num_random_blocks": 2},
    ],
    ids=lambda values: values["mode"],
)
def test_a_million_tokens(values: dict[str, Any]) -> None:
    """Memory goes with the blocks; the dense mask of 2^14 to 2^16 rows would be 256 MB to 4 GB."""
    tracemalloc.start()
    layout = build_layout(policy_of(**values), 12, MILLION)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert layout.blocks > MILLION // layout.block
    assert layout.density < 0.02
    assert peak < 100e6 + 4 * 4 * layout.blocks


def test_bad_lengths_are_refused() -> None:
    policy = policy_of(mode="dense", block=16)
    for values, word in (
        ({"heads": 0, "length": 5}, "heads: expected .*, got 0"),
        ({"heads": 1, "length": 0}, "length: expected .*, got 0"),
        ({"heads": 1, "length": 5, "queries": 6}, "queries: expected 1 to 5, got 6"),
        ({"heads": 1, "length": (1 << 30) + 1}, "length: expected 1 to 1,073,741,824, got 1073741825"),
        ({"heads": 1, "length": 1 << 20}, "layout: expected .* blocks per head, got 4,294,967,296"),
    ):
        with pytest.raises(ValueError, match=word):
            build_layout(policy, **values)


HUGE = 1 << 62


def peak_of(policy: SparseAttentionConfig, length: int) -> tuple[BlockLayout | None, int]:
    """The layout, if it is not refused for its blocks, and the most memory that Python held."""
    layout = None
    tracemalloc.start()
    try:
        layout = build_layout(policy, 1, length)
    except ValueError as error:
        assert "random blocks in each of" in str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return layout, peak


@pytest.mark.parametrize("width", [HUGE, HUGE // 2, 1 << 35])
def test_global_blocks_beyond_the_sequence_need_no_memory(width: int) -> None:
    policy = policy_of(mode="fixed", num_local_blocks=HUGE, num_global_blocks=width)
    layout, peak = peak_of(policy, 320)
    assert layout is not None
    assert bool(layout.block_mask().all())
    assert peak < 1e6


def test_too_many_random_blocks_are_refused_before_they_are_drawn() -> None:
    policy = policy_of(mode="bigbird", num_random_blocks=HUGE)
    layout, peak = peak_of(policy, 1 << 20)
    assert layout is None
    assert peak < 20e6
    few, _ = peak_of(policy, 160)
    assert few is not None
    assert bool(few.block_mask().all())


def test_layouts_are_cached_by_length() -> None:
    cache = LayoutCache(policy_of(mode="fixed"), capacity=2)
    first = cache.get(4, 100)
    assert cache.get(8, 100) is first, "one layout serves any number of heads"
    assert cache.get(4, 100, causal=True) is not first
    assert cache.get(4, 100) is first
    cache.get(4, 200)
    cache.get(4, 300)
    assert cache.get(4, 100) is not first, "the one not used for longest went"
    token = cache.get(4, 100, queries=3, causal=True)
    assert cache.get(4, 100, queries=4, causal=True) is token, "both lie in the last block"
    assert cache.get(4, 100, queries=5, causal=True) is not token


class EmptiedByAnother(OrderedDict[Any, BlockLayout]):
    """Between any two calls here, another thread has dropped everything."""

    def get(self, key: Any, default: Any = None) -> Any:
        found = super().get(key, default)
        self.clear()
        return found

    def __len__(self) -> int:
        length = super().__len__()
        self.clear()
        return length


def test_another_thread_may_drop_what_was_just_found() -> None:
    cache = LayoutCache(policy_of(mode="fixed"), capacity=1)
    first = cache.get(4, 100)
    cache._built = EmptiedByAnother(cache._built)
    assert cache.get(4, 100) is first
    cache._built[0] = cache._built[1] = first
    assert cache.get(4, 100) is not first
