"""The `sparse_attention` section: what it accepts, what it says of mistakes."""

from __future__ import annotations

from typing import Any

import pytest

from zero_ext.config import ConfigError, SparseAttentionConfig, ZeroConfig


@pytest.mark.parametrize(
    ("values", "path", "words"),
    [
        ({"mode": "fixed", "num_random_blocks": 1}, "num_random_blocks", "used by variable, bigbird"),
        ({"mode": "dense", "seed": 1}, "seed", "it has no effect in mode 'dense'"),
        ({"mode": "strided"}, "mode", "'local_sliding_window'"),
        ({"block": 48}, "block", "16, 32, 64 or 128"),
        (
            {"num_local_blocks": 4, "num_global_blocks": 3},
            "num_global_blocks",
            "expected a divisor of num_local_blocks (4), got 3",
        ),
        ({"num_different_global_patterns": 2}, "num_different_global_patterns", "per_head to true"),
        (
            {"num_different_global_patterns": 5, "different_layout_per_head": True},
            "num_different_global_patterns",
            "at most num_local_blocks / num_global_blocks = 4",
        ),
        (
            {"attention": "unidirectional", "horizontal_global_attention": True},
            "horizontal_global_attention",
            "expected false with attention 'unidirectional'",
        ),
        ({"mode": "variable", "local_window_blocks": []}, "local_window_blocks", "a list of integers"),
        ({"mode": "variable", "local_window_blocks": [2, 0]}, "local_window_blocks.1", "got 0"),
        (
            {"mode": "bslongformer", "global_block_indices": [0, 5], "global_block_end_indices": [2]},
            "global_block_end_indices",
            "expected 2 entries, as global_block_indices has, got 1",
        ),
        (
            {"mode": "bslongformer", "global_block_indices": [0, 5], "global_block_end_indices": [2, 5]},
            "global_block_end_indices.1",
            "expected more than its start 5, got",
        ),
        ({"mode": "bigbird", "num_sliding_window_block": 3}, "num_sliding_window_block", "Did you mean"),
    ],
)
def test_mistakes_are_named(values: dict[str, Any], path: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ZeroConfig.from_mapping({"sparse_attention": values})
    assert caught.value.paths == (f"sparse_attention.{path}",)
    assert words in str(caught.value)


def test_null_is_the_default_of_the_mode() -> None:
    def policy(**values: Any) -> SparseAttentionConfig:
        return SparseAttentionConfig.from_mapping(values)

    assert policy(mode="local_sliding_window").unidirectional
    assert not policy(mode="local_sliding_window", attention="bidirectional").unidirectional
    assert not policy().unidirectional
    assert policy(mode="bigbird").random_blocks == 1
    assert policy(mode="variable").random_blocks == 0
    assert policy(mode="bigbird", num_random_blocks=0).random_blocks == 0
    assert ZeroConfig().sparse_attention is None
    both = policy(mode="bslongformer", global_block_indices=[0, 7], global_block_end_indices=[2, 9])
    assert both.global_ranges == ((0, 2), (7, 9))
    assert SparseAttentionConfig.from_mapping(both.to_mapping()) == both


def test_heads_share_a_layout_where_they_are_alike() -> None:
    fixed = {"mode": "fixed", "different_layout_per_head": True}
    for values, layouts in (
        (fixed, 1),
        (fixed | {"num_different_global_patterns": 2}, 6),
        ({"mode": "bigbird"}, 1),
        ({"mode": "bigbird", "different_layout_per_head": True}, 6),
        ({"mode": "bigbird", "different_layout_per_head": True, "num_random_blocks": 0}, 1),
        ({"mode": "bslongformer", "different_layout_per_head": True}, 1),
    ):
        assert SparseAttentionConfig.from_mapping(values).layout_heads(6) == layouts
