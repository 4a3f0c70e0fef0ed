"""Files that are hostile until checked: errors are short, printable, and found in time linear in the file."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from zero_ext.config import ConfigError, load_config, load_deepspeed_config
from zero_ext.config.config_errors import Problem
from zero_ext.config.sources.json_file import LARGEST_FILE_BYTES, parse_json_object, read_json_object
from zero_ext.config.training import OptimizerConfig
from zero_ext.optim.optimizer_builder import build_optimizer

KEYS = 60_000
MEGABYTE = 1 << 20


def build(source: dict[str, Any]) -> None:
    policy = OptimizerConfig(type="Adam", params=source)
    build_optimizer(policy, [torch.nn.Parameter(torch.zeros(1))])


@pytest.mark.parametrize("prefix", ["key", "stag", "zero_optimizatio", "lr"])
@pytest.mark.parametrize("load", [load_config, load_deepspeed_config, build])
def test_thousands_of_unknown_keys(load: Callable[[Any], Any], prefix: str) -> None:
    source = {f"{prefix}{number}": number for number in range(KEYS)}
    with (
        mock.patch("difflib.get_close_matches", wraps=difflib.get_close_matches) as compared,
        pytest.raises(ConfigError) as caught,
    ):
        load(source)
    text = str(caught.value)
    assert compared.call_count <= 40
    assert len(text.encode()) <= 2000 and len(caught.value.problems) == KEYS
    shown = text.count("\n  - ") - 1
    assert shown > 0 and f"{prefix}{shown - 1}: " in text and text.endswith(f"\n  - and {KEYS - shown} more")


@pytest.mark.parametrize(
    "source",
    [
        {"k" * MEGABYTE: 1},
        {"stage": "v" * MEGABYTE},
        {"offload": {"k" * MEGABYTE: {"v" * MEGABYTE: 1}}, "zero_optimization": {"ü" * MEGABYTE: 1}},
        {"optimizer": {"type": "t" * MEGABYTE, "params": {}}, "zero_optimization": "z" * MEGABYTE},
        {"\x1b[2J\ud800" * 1000: 1, "stage": "\x1b[2J\ud800"},
        {"\n" * MEGABYTE: 1, "stage": [["n"] * MEGABYTE]},
    ],
    ids=range(6),
)
@pytest.mark.parametrize("load", [load_config, load_deepspeed_config])
def test_long_and_unprintable_texts(load: Callable[[Any], Any], source: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(source)
    text = str(caught.value)
    assert len(text.encode()) <= 2000
    assert text.replace("\n", "").isprintable()


def test_a_few_problems_are_all_listed_in_full() -> None:
    problems = [Problem(f"key{number}", "w" * 80) for number in range(15)]
    assert str(ConfigError(problems, "a.json")) == "a.json: " + "".join(f"\n  - {each}" for each in problems)
    assert str(ConfigError(problems[0], "a.json")) == f"a.json: {problems[0]}"


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ('{"stage": 1,\n "seed": 1,\n "stage": 2}', ("'stage'", "twice")),
        ('{"units": {"a": 1, "a": 1}}', ("'a'", "twice")),
        ('{\n  "stage": 3\n  "seed": 0\n}', ("line 3", "column 3", "seed")),
        ('{"stage": 3,}', ("line 1",)),
        ("// comment\n{}", ("line 1", "comment")),
        ("", ("line 1",)),
        ('{"gradient_clipping": NaN}', ("NaN",)),
        ('{"gradient_clipping": -Infinity}', ("-Infinity",)),
        ("[1, 2]", ("list", "expected an object")),
        ("3", ("int",)),
        ("null", ("NoneType",)),
        ('{"a":' * 40 + "1" + "}" * 40, ("expected at most 32 nested levels",)),
        ('{"a":' + "[" * 100_000 + "]" * 100_000 + "}", ("expected at most 32 nested levels",)),
        ('{"seed": ' + "9" * 5000 + "}", ("seed", "digits")),
    ],
)
def test_bad_text(tmp_path: Path, text: str, fragments: tuple[str, ...]) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    for load in (read_json_object, load_config, load_deepspeed_config):
        with pytest.raises(ConfigError) as caught:
            load(path)
        assert str(path) in str(caught.value)
        assert any(fragment in str(caught.value) for fragment in fragments)


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "missing.json")
    with pytest.raises(ConfigError, match="null byte"):
        load_config("\0")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(tmp_path)
    large = tmp_path / "large.json"
    large.write_bytes(b'{"a": "' + b"x" * LARGEST_FILE_BYTES + b'"}')
    with pytest.raises(ConfigError, match="expected at most 1048576 bytes"):
        load_config(large)
    binary = tmp_path / "binary.json"
    binary.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ConfigError, match="expected UTF-8, got byte 7"):
        load_config(binary)


def test_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "bom.json"
    path.write_bytes(b'\xef\xbb\xbf{"stage": 1}')
    assert load_config(path).stage == 1


def test_good_text() -> None:
    assert parse_json_object('{"a": [1, {"b": 2.5}], "c": null}', "here") == {"a": [1, {"b": 2.5}], "c": None}
