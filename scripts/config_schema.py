"""Write the JSON Schema of configurations, with which editors complete and check them.

`python -m scripts.config_schema docs/reference/zero_ext.schema.json` rewrites the file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from scripts.config_reference import attribute_texts, sentence
from zero_ext.config.base_section import ConfigSection, section_type
from zero_ext.config.zero_config import ZeroConfig


def schema() -> dict[str, Any]:
    """Return the schema: every key with its meaning, accepted values and default."""
    found = ZeroConfig.model_json_schema()
    sections = {each.__name__: each for each in _sections(ZeroConfig)}
    for name, section in sections.items():
        described = found if section is ZeroConfig else found["$defs"][name]
        described["description"] = (section.__doc__ or "").partition("\n")[0]
        meanings = attribute_texts(section)
        for key, values in described["properties"].items():
            values.pop("title", None)
            values["description"] = sentence(meanings[key])
    found["properties"]["$schema"] = {"type": "string", "description": "The path or address of this file."}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_in_words_of_the_standard(found)}


# pydantic leaves these as they are where a validator of one's own comes first.
_LIMITS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "multiple_of": "multipleOf"}


def _in_words_of_the_standard(value: Any) -> Any:
    if isinstance(value, list):
        return [_in_words_of_the_standard(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {_LIMITS.get(key, key): _in_words_of_the_standard(each) for key, each in value.items()}


def _sections(model: type[ConfigSection]) -> list[type[ConfigSection]]:
    inner = [section_type(field.annotation) for field in model.model_fields.values()]
    return [model, *(found for each in inner if each is not None for found in _sections(each))]


def text() -> str:
    """Return the file."""
    return json.dumps(schema(), indent=1) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(text(), encoding="utf-8")
