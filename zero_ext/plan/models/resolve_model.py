"""The model that a word on the command line means."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from zero_ext.plan.models.hugging_face import model_of_file
from zero_ext.plan.models.model_spec import ModelSpec
from zero_ext.plan.models.presets import PRESETS, preset_named, shape_of_count
from zero_ext.plan.parse_sizes import COUNTS, count_of, short_number

FEWEST, MOST = 1000, 10**15


def model_named(model: str) -> ModelSpec:
    """Return a preset, a number of parameters (``7.5B``), a Hugging Face ``config.json``, or a folder with
    one.

    Raises ValueError for anything else, naming the presets, and for a file that cannot be used, naming its
    keys.
    """
    path = Path(model)
    if model and (path / "config.json").is_file():
        return model_of_file(path / "config.json")
    if path.is_file() or path.suffix == ".json":
        return model_of_file(path)
    shape = preset_named(model)
    if shape is not None:
        return ModelSpec.of_shape(shape, f"preset {shape.name}")
    count = count_of(model)
    if count is None and model and path.is_dir():
        return model_of_file(path / "config.json")
    if count is None:
        raise ValueError(
            "MODEL: expected a config.json, a folder that has one, a number of parameters like 7.5B, or "
            f"one of {', '.join(PRESETS)}, got {model!r}. Pass one of these."
        )
    if not FEWEST <= count <= MOST:
        raise ValueError(
            f"MODEL: expected {FEWEST:,} to {MOST:,} parameters, got {model!r}. Pass a number in this range."
        )
    name = short_number(count, tuple(COUNTS)).replace(" ", "")
    shape = replace(shape_of_count(count), name=name)
    source = f"{count:,} parameters, as a GPT of {shape.layers} layers and hidden size {shape.hidden}"
    return ModelSpec.of_shape(shape, source, count)
