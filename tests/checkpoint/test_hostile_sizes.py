"""Small files that would take long or much memory to refuse: linear time, errors of at most 2000 bytes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.fake_source import SMALL, FakeSource
from tests.checkpoint.mutations import edit_manifest, sign
from zero_ext.checkpoint import CheckpointError, inspect_checkpoint, load_state, save_state
from zero_ext.checkpoint.files import shortened
from zero_ext.checkpoint.format import manifest
from zero_ext.checkpoint.format.json_state import decode, encode
from zero_ext.checkpoint.format.tensor_files import find_weights


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_state(tmp_path / "run", FakeSource(SMALL, 1))
    return tmp_path / "run" / "step-000001"


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < 4


def refuse(folder: Path) -> str:
    source = FakeSource(SMALL, 2)
    with pytest.raises((CheckpointError, ValueError)) as caught:
        load_state(folder.parent, source)
    assert source.holds(2)
    text = str(caught.value)
    assert len(text.encode()) <= 2000
    assert text.endswith("Nothing of the model was changed.")
    return text


def test_a_repeated_key_among_many(folder: Path) -> None:
    keys = [f'"key{number}": 0' for number in range(100_000)]
    sign(folder, ("{" + ", ".join([*keys, keys[-1]])).encode())
    assert "key 'key99999' occurs twice in one object" in refuse(folder)


def test_items_under_a_long_name() -> None:
    state = {"x" * (1 << 20): [0] * 50_000}
    assert decode(encode(state, "state"), "state") == state
    with pytest.raises(ValueError, match="unknown mark") as caught:
        decode({"x" * (1 << 20): [0, {"$y": 1}]}, "state")
    assert str(caught.value).startswith("state.xxx") and "[1]: unknown mark '$y'" in str(caught.value)
    assert len(str(caught.value)) < 1000
    with pytest.raises(TypeError, match=r"^state\.a\[2\]\['\$b'\] key \(1, <object") as raised:
        encode({"a": [0, 1, {"$b": {(1, object()): 1}}]}, "state")
    assert "builtins.object cannot be stored" in str(raised.value)


def test_numbers_of_one_hash_as_keys(folder: Path) -> None:
    numbers = [number * (2**61 - 1) for number in range(1 << 60, (1 << 60) + 20_000)]
    content = {"$dict": [[{"$tuple": [number]}, 0] for number in numbers]}
    edit_manifest(folder, lambda fields: fields.update(client_state=content))
    assert "keys: expected at most 1000 numbers of more than 64 bits" in refuse(folder)
    with pytest.raises(ValueError, match=r"^state: keys: expected at most 1000 numbers"):
        encode(dict.fromkeys(numbers[:1001]), "state")
    state = dict.fromkeys(numbers[:1000])
    assert decode(encode(state, "state"), "state") == state


LONG = "x" * (3 << 20)
LONG_TEXTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "format": lambda fields: fields.update(format=LONG),
    "version": lambda fields: fields.update(version=[[LONG]]),
    "key": lambda fields: fields.update({LONG: 1}),
    "parameter": lambda fields: fields["parameters"].update({LONG: fields["parameters"]["b.bias"]}),
    "kind": lambda fields: fields["slices"][0].update(kind=LONG),
    "dtype": lambda fields: fields["slices"][0].update(dtype=LONG),
    "file": lambda fields: fields["files"][0].update(name=LONG),
    "mark": lambda fields: fields.update(client_state={f"${LONG}": 1}),
    "float": lambda fields: fields.update(client_state={"$float": LONG}),
    "shape": lambda fields: fields.update(
        client_state={"$tensor": {"dtype": "float32", "shape": [1 << 70] * 100_000, "data": ""}}
    ),
}


@pytest.mark.parametrize("name", LONG_TEXTS)
def test_no_error_repeats_a_long_text(folder: Path, name: str) -> None:
    edit_manifest(folder, LONG_TEXTS[name])
    refuse(folder)
    if name not in ("mark", "float", "shape"):
        with pytest.raises(CheckpointError) as caught:
            inspect_checkpoint(folder)
        assert len(str(caught.value).encode()) <= 2000


def test_a_shape_that_no_tensor_has(folder: Path) -> None:
    content = {"$tensor": {"dtype": "float32", "shape": [0, 1 << 61, 1 << 61], "data": ""}}
    edit_manifest(folder, lambda fields: fields.update(client_state=content))
    assert "client_state: '$tensor' does not hold what it should" in refuse(folder)


def test_an_index_of_a_name_that_no_file_has(tmp_path: Path) -> None:
    for name in ("\ud800.safetensors", f"{LONG}.safetensors"):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(CheckpointError) as caught:
            find_weights(tmp_path)
        assert len(str(caught.value).encode()) <= 2000


def test_the_manifest_follows_the_shards(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "manifest.json"
    shard = path.with_name("rank-00000.safetensors")
    with path.open("ab") as file:
        file.truncate((64 << 20) + 4 * shard.stat().st_size + 1)
    assert f"{shard.stat().st_size} bytes of shards, got more" in refuse(folder)
    save_state(folder.parent, FakeSource(SMALL, 1))
    edit_manifest(folder, lambda fields: fields.update(client_state=[[]] * 1_600_000))
    assert "lists and objects, got 16000" in refuse(folder)
    # What would be refused is not saved, and what is saved is read.
    monkeypatch.setattr(manifest, "_BYTES_FOR_NAMED_STATES", 1000)
    save_state(folder.parent, FakeSource(SMALL, 1))
    with pytest.raises(ValueError, match=r"client_state and extra: manifest: expected at most .* got more"):
        save_state(folder.parent, FakeSource(SMALL, 1), client_state="x" * 100_000)
    load_state(folder.parent, FakeSource(SMALL, 2))


def test_shortened_retains_both_ends() -> None:
    text = "begin" + "ü" * 5000 + "end"
    cut = shortened(text)
    assert cut.startswith("beginü") and cut.endswith("üend") and " ... " in cut
    assert 1990 < len(cut.encode()) <= 2000
    assert shortened("as it is") == "as it is"
    assert shortened("\ud800") == "\\ud800"
