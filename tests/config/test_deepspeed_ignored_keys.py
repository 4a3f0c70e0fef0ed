"""DeepSpeed keys that ask for nothing here: accepted, with a note where the outcome differs."""

from __future__ import annotations

from zero_ext.config import load_deepspeed_config


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
