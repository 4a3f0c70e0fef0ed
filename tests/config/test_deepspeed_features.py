"""DeepSpeed's `sparse_attention` section: translated by its mode, every other key reported; keys that ask for
nothing here: accepted, with a note where the outcome differs."""

from __future__ import annotations

from typing import Any

from zero_ext.config import load_deepspeed_config


def test_sparse_attention_of_the_documentation() -> None:
    """DeepSpeed's documentation lists the keys of all modes beside mode fixed."""
    unused: dict[str, Any] = {
        "num_random_blocks": 0,
        "local_window_blocks": [4],
        "global_block_indices": [0],
        "global_block_end_indices": None,
        "num_sliding_window_blocks": 3,
    }
    used: dict[str, Any] = {"mode": "fixed", "block": 16, "num_local_blocks": 4, "num_global_blocks": 1}
    used |= {"attention": "bidirectional", "horizontal_global_attention": False}
    used |= {"different_layout_per_head": True, "num_different_global_patterns": 4}
    found = load_deepspeed_config({"gradient_clipping": 0, "sparse_attention": used | unused})
    policy = found.config.sparse_attention
    assert policy is not None
    assert (policy.mode, policy.num_different_global_patterns, policy.unidirectional) == ("fixed", 4, False)
    assert {note.path.rpartition(".")[2] for note in found.notes} == unused.keys()


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


def test_inputs_are_always_cast() -> None:
    """Accelerate writes `auto_cast` true for mixed precision without a section of the user's."""
    for enabled, cast, paths in ((True, True, []), (True, False, ["fp16.auto_cast"]), (False, False, [])):
        source = {"gradient_clipping": 0, "fp16": {"enabled": enabled, "auto_cast": cast}}
        found = load_deepspeed_config(source)
        assert found.config.precision.dtype == ("fp16" if enabled else "keep")
        assert [(note.path, note.outcome) for note in found.notes] == [(path, "no effect") for path in paths]


def test_dotted_keys_are_ignored() -> None:
    """TRL writes them beside the nested ones that it means."""
    zero = {"stage": 3, "stage3_prefetch_bucket_size": 7}
    source = {"gradient_clipping": 0, "zero_optimization": zero}
    dotted = {"zero_optimization.stage3_prefetch_bucket_size": 0.9 * 15**2, "zero_optimization.stage": "auto"}
    found = load_deepspeed_config({**source, **dotted})
    assert found.config == load_deepspeed_config(source).config
    assert [(note.path, note.outcome) for note in found.notes] == [(path, "no effect") for path in dotted]
