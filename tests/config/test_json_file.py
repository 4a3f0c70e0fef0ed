"""JSON files are hostile until checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from zero_ext.config import ConfigError, load_config, load_deepspeed_config
from zero_ext.config.json_file import LARGEST_FILE_BYTES, parse_json_object, read_json_object


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
