"""The tables in docs/reference/configuration.md match the code, and the ready files in configs/ load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import config_schema
from scripts.config_reference import attribute_texts, native_table, rewrite
from zero_ext.config import ZeroConfig, load_config, load_deepspeed_config
from zero_ext.config.base_section import key_paths, section_type
from zero_ext.config.deepspeed.translate import TABLE

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "configuration.md"


def test_page_is_what_the_code_says() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert rewrite(text) == text, "run: python -m scripts.config_reference docs/reference/configuration.md"


def test_page_holds_every_key() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for path, field in key_paths(ZeroConfig).items():
        if section_type(field.annotation) is None:
            assert f"| `{path}` |" in text
    for key in TABLE:
        assert f"| `{key.path}`" in text


def test_defaults_that_are_lists_are_printed_in_full() -> None:
    rows = {row.split("|")[1].strip(): row for row in native_table().splitlines()}
    lists = []
    for path, field in key_paths(ZeroConfig).items():
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        if isinstance(default, tuple):
            shown = rows[f"`{path}`"].split("|")[3].strip(" `")
            assert tuple(json.loads(shown)) == default
            lists.append(default)
    assert () in lists
    assert (4,) in lists


def test_every_native_key_is_explained() -> None:
    def visit(model: type) -> None:
        texts = attribute_texts(model)
        for name, field in model.model_fields.items():
            assert texts.get(name), f"{model.__name__}.{name} lacks a line in its docstring"
            inner = section_type(field.annotation)
            if inner is not None:
                visit(inner)

    visit(ZeroConfig)


def test_markers_are_wanted() -> None:
    with pytest.raises(ValueError, match="begin native keys"):
        rewrite("a page without markers")


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.json")), ids=lambda path: path.name)
def test_ready_files_load(path: Path) -> None:
    if path.name.startswith("deepspeed_"):
        found = load_deepspeed_config(path)
        assert f"stage{found.config.stage}" in path.name
        assert found.config.batch.resolve(1).micro_batch_size
        assert load_config(path) == found.config
    else:
        assert path.name.startswith(f"stage{load_config(path).stage}")


def test_the_schema_is_that_of_the_keys() -> None:
    path = ROOT / "docs" / "reference" / "zero_ext.schema.json"
    assert path.read_text() == config_schema.text(), f"run: python -m scripts.config_schema {path}"
    schema = json.loads(path.read_text())
    assert set(schema["properties"]) == {*ZeroConfig.model_fields, "$schema"}
    offload = schema["$defs"]["OffloadConfig"]["properties"]["optimizer"]
    assert offload["enum"][0] == "device" and offload["default"] == "device"
    stage = schema["properties"]["stage"]
    assert (stage["minimum"], stage["maximum"], stage["default"]) == (0, 3, 3)


def test_there_is_a_file_for_each_stage() -> None:
    names = {path.name for path in (ROOT / "configs").glob("*.json")}
    assert {"stage1.json", "stage2.json", "stage3.json", "deepspeed_stage2_fp16.json"} <= names
