"""DeepSpeed's `sparse_attention` section: translated by its mode, every other key reported."""

from __future__ import annotations

from zero_ext.config import load_deepspeed_config


def test_sparse_attention_of_the_documentation() -> None:
    """DeepSpeed's documentation lists the keys of all modes beside mode fixed."""
    found = load_deepspeed_config(
        {
            "gradient_clipping": 0,
            "sparse_attention": {
                "mode": "fixed",
                "block": 16,
                "different_layout_per_head": True,
                "num_local_blocks": 4,
                "num_global_blocks": 1,
                "attention": "bidirectional",
                "horizontal_global_attention": False,
                "num_different_global_patterns": 4,
                "num_random_blocks": 0,
                "local_window_blocks": [4],
                "global_block_indices": [0],
                "global_block_end_indices": None,
                "num_sliding_window_blocks": 3,
            },
        }
    )
    policy = found.config.sparse_attention
    assert policy is not None
    assert (policy.mode, policy.num_different_global_patterns, policy.unidirectional) == ("fixed", 4, False)
    assert {note.path.rpartition(".")[2] for note in found.notes} == {
        "num_random_blocks",
        "local_window_blocks",
        "global_block_indices",
        "global_block_end_indices",
        "num_sliding_window_blocks",
    }


def test_sparse_attention_defaults_are_those_of_the_json() -> None:
    found = load_deepspeed_config({"gradient_clipping": 0, "sparse_attention": {"mode": "bigbird"}})
    policy = found.config.sparse_attention
    assert policy is not None
    assert policy.random_blocks == 0
    assert str(found.notes[0]).startswith("sparse_attention.num_random_blocks: default")
    assert load_deepspeed_config({"sparse_attention": None}).config.sparse_attention is None
    fixed = load_deepspeed_config({"sparse_attention": {"block": 32}}).config.sparse_attention
    assert fixed is not None
    assert (fixed.mode, fixed.block, fixed.num_local_blocks) == ("fixed", 32, 4)
