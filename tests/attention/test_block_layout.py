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
        (torch.ones(2, 2), 16, {}, "torch.float32 of shape"),
        (torch.ones(2, 2, 2, 2, dtype=torch.bool), 16, {}, "wanted torch.bool of"),
        (torch.ones(0, 2, dtype=torch.bool), 16, {}, "none of them 0"),
        (torch.ones(2, 2, dtype=torch.bool), 48, {}, "block is 48, wanted one of 16, 32, 64, 128"),
        (torch.ones(2, 2, dtype=torch.bool), 16, {"query_length": 33}, "needs 3 blocks of 16"),
        (torch.ones(2, 2, dtype=torch.bool), 16, {"key_length": 16}, "key_length is 16"),
    ],
)
def test_what_is_no_mask(mask: torch.Tensor, block: int, lengths: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        BlockLayout.from_block_mask(mask, block, **lengths)


def test_tensors_that_do_not_fit() -> None:
    good = BlockLayout.from_block_mask(torch.ones(2, 2, dtype=torch.bool), 16)
    with pytest.raises(
        ValueError, match=r"row_pointers is torch.int32 of shape \(1, 3\), wanted .* \(1, 4\)"
    ):
        BlockLayout(16, 1, 48, 32, good.row_pointers, good.columns)
    with pytest.raises(ValueError, match=r"columns is torch.int64"):
        BlockLayout(16, 1, 32, 32, good.row_pointers, good.columns.long())
    with pytest.raises(ValueError, match="query_length is 0"):
        BlockLayout(16, 1, 0, 32, good.row_pointers, good.columns)


def test_a_dense_mask_of_a_long_sequence_is_refused() -> None:
    pointers = torch.zeros(1, 2049, dtype=torch.int32)
    layout = BlockLayout(128, 1, 128 * 2048, 128, pointers, torch.zeros(0, dtype=torch.int32))
    assert layout.block_mask().shape == (1, 2048, 1)
    with pytest.raises(ValueError, match=r"262,144 × 128 tokens"):
        layout.dense_mask()


@pytest.mark.parametrize(
    ("pointers", "columns", "words"),
    [
        ([[0, 2, 4], [4, 5, 5]], [0, 2, 1, 2, 0], None),
        ([[0, 2, 4], [4, 5, 6]], [0, 2, 1, 2, 0], "from 0 to 6, wanted ascending offsets from 0 to the 5"),
        ([[1, 2, 4], [4, 5, 5]], [0, 2, 1, 2, 0], "from 1 to 5"),
        ([[0, 4, 2], [4, 5, 5]], [0, 2, 1, 2, 0], "wanted ascending offsets"),
        ([[0, 2, 3], [4, 5, 5]], [0, 2, 1, 2, 0], "do not begin where"),
        ([[0, 2, 4], [4, 5, 5]], [0, 3, 1, 2, 0], "columns go from 0 to 3, wanted 0 to 2"),
        ([[0, 2, 4], [4, 5, 5]], [0, -2, 1, 2, 0], "columns go from -2 to 2"),
        ([[0, 2, 4], [4, 5, 5]], [2, 0, 1, 2, 0], "do not ascend within every row"),
        ([[0, 2, 4], [4, 5, 5]], [0, 2, 1, 1, 0], "do not ascend within every row"),
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
    with pytest.raises(ValueError, match="has 6 blocks, wanted at most 5"):
        BlockLayout.from_block_mask(torch.ones(2, 3, dtype=torch.bool), 16)
