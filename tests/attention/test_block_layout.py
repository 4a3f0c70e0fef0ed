"""Layouts from block masks, and what does not make one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention.strategies import SEEDS
from zero_ext.attention import BlockLayout, block_layout


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 3), st.integers(1, 7), st.integers(1, 7), st.sampled_from((16, 32, 64, 128)), SEEDS)
def test_a_block_mask_comes_back(heads: int, rows: int, columns: int, block: int, seed: int) -> None:
    torch.manual_seed(seed)
    mask = torch.rand(heads, rows, columns) < 0.4
    query_length, key_length = rows * block - 3, columns * block - block + 1
    layout = BlockLayout.from_block_mask(mask, block, query_length=query_length, key_length=key_length)
    assert torch.equal(layout.block_mask(), mask)
    assert layout.blocks == int(mask.sum())
    assert layout.density == pytest.approx(float(mask.float().mean()))
    dense = layout.dense_mask()
    assert dense.shape == (heads, query_length, key_length)
    assert torch.equal(dense[:, ::block, ::block], mask)
    assert torch.equal(dense[:, block - 4 :: block, ::block], mask[:, : len(dense[0, block - 4 :: block])])
    bytes_held = sum(
        4 * tensor.numel()
        for tensor in (layout.row_pointers, layout.columns, layout.column_pointers, layout.rows)
    )
    assert layout.nbytes == bytes_held


def test_one_mask_for_all_heads_and_devices() -> None:
    layout = BlockLayout.from_block_mask(torch.eye(3, dtype=torch.bool), 32)
    assert (layout.heads, layout.query_length, layout.key_length) == (1, 96, 96)
    assert layout.to("cpu") is layout
    assert layout.to("meta").columns.is_meta


@pytest.mark.parametrize(
    ("mask", "block", "lengths", "words"),
    [
        (torch.ones(2, 2), 16, {}, "block mask: expected .*, got torch.float32 of shape"),
        (
            torch.ones(2, 2, 2, 2, dtype=torch.bool),
            16,
            {},
            r"expected torch.bool of .*, got torch.bool of shape \(2, 2, 2, 2\)",
        ),
        (
            torch.ones(0, 2, dtype=torch.bool),
            16,
            {},
            r"block mask: expected .* none of them 0, got .* \(0, 2\)",
        ),
        (torch.ones(2, 2, dtype=torch.bool), 48, {}, "block: expected one of 16, 32, 64, 128, got 48"),
        (
            torch.ones(2, 2, dtype=torch.bool),
            16,
            {"query_length": 33},
            "query_length: expected a length of 2 blocks of 16.*, got 33, which needs 3",
        ),
        (torch.ones(2, 2, dtype=torch.bool), 16, {"key_length": 16}, "key_length: expected .*, got 16"),
    ],
)
def test_what_is_no_mask(mask: torch.Tensor, block: int, lengths: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        BlockLayout.from_block_mask(mask, block, **lengths)


def test_tensors_that_do_not_fit() -> None:
    good = BlockLayout.from_block_mask(torch.ones(2, 2, dtype=torch.bool), 16)
    with pytest.raises(
        ValueError, match=r"row_pointers: expected .* \(1, 4\), got torch.int32 of shape \(1, 3\)"
    ):
        BlockLayout(16, 1, 48, 32, good.row_pointers, good.columns)
    with pytest.raises(ValueError, match=r"columns: expected contiguous int32 .*, got torch.int64"):
        BlockLayout(16, 1, 32, 32, good.row_pointers, good.columns.long())
    with pytest.raises(ValueError, match="query_length: expected at least 1, got 0"):
        BlockLayout(16, 1, 0, 32, good.row_pointers, good.columns)


def test_a_dense_mask_of_a_long_sequence_is_refused() -> None:
    pointers = torch.zeros(1, 2049, dtype=torch.int32)
    layout = BlockLayout(128, 1, 128 * 2048, 128, pointers, torch.zeros(0, dtype=torch.int32))
    assert layout.block_mask().shape == (1, 2048, 1)
    with pytest.raises(ValueError, match=r"dense mask: expected .* tokens per side, got 262,144 × 128"):
        layout.dense_mask()


@pytest.mark.parametrize(
    ("pointers", "columns", "words"),
    [
        ([[0, 2, 4], [4, 5, 5]], [0, 2, 1, 2, 0], None),
        (
            [[0, 2, 4], [4, 5, 6]],
            [0, 2, 1, 2, 0],
            "expected ascending offsets from 0 to 5.*, got offsets from 0 to 6",
        ),
        ([[1, 2, 4], [4, 5, 5]], [0, 2, 1, 2, 0], "got offsets from 1 to 5"),
        ([[0, 4, 2], [4, 5, 5]], [0, 2, 1, 2, 0], "row_pointers: expected ascending offsets"),
        ([[0, 2, 3], [4, 5, 5]], [0, 2, 1, 2, 0], "row_pointers: expected those of a head to begin where"),
        ([[0, 2, 4], [4, 5, 5]], [0, 3, 1, 2, 0], "columns: expected values from 0 to 2, got 0 to 3"),
        ([[0, 2, 4], [4, 5, 5]], [0, -2, 1, 2, 0], "columns: expected .*, got -2 to 2"),
        ([[0, 2, 4], [4, 5, 5]], [2, 0, 1, 2, 0], "columns: expected ascending values in every row"),
        ([[0, 2, 4], [4, 5, 5]], [0, 2, 1, 1, 0], "columns: expected ascending values in every row"),
        ([[0, 0, 0], [0, 0, 0]], [], None),
    ],
)
def test_offsets_and_columns_are_checked(
    pointers: list[list[int]], columns: list[int], words: str | None
) -> None:
    tensors = (torch.tensor(pointers, dtype=torch.int32), torch.tensor(columns, dtype=torch.int32))
    if words is None:
        assert BlockLayout(16, 2, 32, 48, *tensors).blocks == len(columns)
        return
    with pytest.raises(ValueError, match=words):
        BlockLayout(16, 2, 32, 48, *tensors)


def test_more_blocks_than_offsets_can_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_layout, "MOST_BLOCKS", 5)
    assert BlockLayout.from_block_mask(torch.ones(1, 5, dtype=torch.bool), 16).blocks == 5
    with pytest.raises(ValueError, match="block mask: expected at most 5 blocks, got 6"):
        BlockLayout.from_block_mask(torch.ones(2, 3, dtype=torch.bool), 16)
