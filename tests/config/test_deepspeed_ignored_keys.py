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
