"""Configuration files in YAML and TOML: what they hold, and what of them is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from zero_ext.config import ConfigError
from zero_ext.config.sources.config_file import read_config_file


def _read(folder: Path, name: str, text: str) -> dict[str, object]:
    path = folder / name
    path.write_text(text)
    return read_config_file(path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("1e-4", 1e-4), ("-2.5", -2.5), (".5", 0.5), ("5E8", 5e8), ("1.", 1.0)),
        *(("17", 17), ("-3", -3), ("010", 10), ("1_000", "1_000"), ("0x10", "0x10")),
        *(("true", True), ("False", False), ("yes", "yes"), ("off", "off"), ("n", "n")),
        *(("null", None), ("~", None), ("", None), ("'1'", "1"), ("2020-01-01", "2020-01-01")),
        *((".nan", ".nan"), (".inf", ".inf"), ("[1, [a]]", [1, ["a"]]), ("{b: 1}", {"b": 1})),
    ],
)
def test_yaml_has_the_scalars_of_version_1_2(tmp_path: Path, text: str, value: object) -> None:
    found = _read(tmp_path, "a.yaml", f"key: {text}\n")
    assert found == {"key": value} and type(found["key"]) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "fragment"),
    [
        ("a.yaml", "a: &x 1\nb: *x\n", "an anchor, an alias or a tag"),
        ("a.yaml", "a: !!python/object/apply:os.getcwd []\n", "an anchor, an alias or a tag"),
        ("a.yaml", "a: !!binary YQ==\n", "an anchor, an alias or a tag"),
        ("a.yaml", "b: 1\nc: 2\nb: 3\n", "line 3, column 1: key 'b' twice"),
        ("a.yaml", "3: 1\n", "key 3, which is no text"),
        ("a.yaml", "? [1]\n: 2\n", "which is no text"),
        ("a.yml", "a: [1\n", "expected YAML, got an error at line 2"),
        ("a.yml", "a: 1\n---\nb: 2\n", "another document"),
        ("a.yml", "a: \x00\n", "expected YAML, got an error"),
        ("a.yml", "- 1\n", "expected an object at the top level, got a list"),
        ("a.yml", "a: " + "1" * 5000, "expected YAML, got an error"),
        ("a.toml", "a = " + "1" * 5000, "expected TOML, got an error"),
        ("a.yml", "a: " + "[" * 40 + "]" * 40, "at most 32 nested levels"),
        ("a.yml", "a: " + "[" * 3000 + "]" * 3000, "at most 32 nested levels"),
        ("a.toml", "a = 1\na = 2\n", "expected TOML, got an error"),
        ("a.toml", "a: 1\n", "expected TOML, got an error"),
        ("a.toml", "a = " + "[" * 40 + "]" * 40, "at most 32 nested levels"),
        ("a.toml", "a = " + "[" * 5000 + "]" * 5000, "at most 32 nested levels"),
        ("a.json", "a = 1", "expected JSON"),
        ("a.conf", "a = 1", "expected JSON"),
    ],
)
def test_refused(tmp_path: Path, name: str, text: str, fragment: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _read(tmp_path, name, text)
    assert str(caught.value).startswith(str(tmp_path / name)) and fragment in str(caught.value)


@pytest.mark.parametrize("name", ["a.yaml", "a.toml"])
def test_a_file_of_comments_is_empty(tmp_path: Path, name: str) -> None:
    assert _read(tmp_path, name, "# nothing\n") == {}


@pytest.mark.parametrize(("name", "package"), [("a.yaml", "PyYAML"), ("a.toml", "tomli")])
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    for module in ("yaml", "tomllib", "tomli"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"expected {package} to read"):
        _read(tmp_path, name, "")
