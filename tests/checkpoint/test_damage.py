"""Damaged, foreign and hostile checkpoints: a clear error, and not one element of the model changed."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.fake_source import FakeSource, channels_last, dense
from tests.checkpoint.mutations import edit_manifest, flip, sign
from tests.multi.pool import RankPool
from tests.multi.rank import World
from zero_ext.checkpoint import CheckpointError, inspect_checkpoint, load_state, loading, save_state
from zero_ext.checkpoint.chunk_reader import ChunkReader

MODULE = "tests.checkpoint.test_damage"
STATE, OTHER = 5, 6
TABLE = {
    "big": dense(300_000),  # more than one chunk
    "conv": channels_last(4, 3, 2, 2),
    "tied": dense(9, aliases=("alias",)),
    "factored": dense(
        4, 3, unsharded={"left": torch.empty(4, 4), "steps": torch.empty(2, 2, dtype=torch.int64)}
    ),
    "frozen": dense(6, 2, trainable=False, kinds={"master": torch.bfloat16}),
}


def save_on_rank(world: World, directory: str) -> None:
    save_state(directory, FakeSource(TABLE, STATE, world.rank, world.size, world.group))


@pytest.fixture(scope="module")
def original(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    rank_pool.run(2, f"{MODULE}:save_on_rank", {"directory": str(folder)})
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Iterator[Path]:
    """A checkpoint of two ranks to be damaged."""
    shutil.copytree(original, tmp_path / "run")
    yield tmp_path / "run"


def step(folder: Path) -> Path:
    return folder / "step-000005"


def refuse(folder: Path, source: FakeSource | None = None, **settings: Any) -> str:
    """The error of a load, after checking that it changed nothing."""
    source = source or FakeSource(TABLE, OTHER)
    with pytest.raises((CheckpointError, ValueError)) as caught:
        load_state(folder, source, **settings)
    assert source.holds(OTHER), "a refused load changed the model"
    assert source.finished == 0
    text = str(caught.value)
    assert "Nothing of the model was changed" in text
    return text


def test_the_original_loads(folder: Path) -> None:
    source = FakeSource(TABLE, OTHER)
    load_state(folder, source)
    assert source.holds(STATE)
    edit_manifest(step(folder), lambda fields: None)
    load_state(folder, source)


@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"])
def test_any_flipped_bit_is_found(folder: Path, name: str, seed: int) -> None:
    generator = random.Random(seed)
    path = step(folder) / name
    size = path.stat().st_size
    positions = [0, 7, 8, size - 1, *(generator.randrange(size) for _ in range(12))]
    for position in positions:
        bit = generator.randrange(8)
        flip(path, position, bit)
        assert name in refuse(folder), f"bit {bit} of byte {position}"
        flip(path, position, bit)
    load_state(folder, FakeSource(TABLE, OTHER))


@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"])
def test_any_truncation_is_found(folder: Path, name: str, seed: int) -> None:
    path = step(folder) / name
    data = path.read_bytes()
    for length in (0, 1, random.Random(seed).randrange(len(data)), len(data) - 1):
        path.write_bytes(data[:length])
        assert name in refuse(folder), length
    path.write_bytes(data + b"\0")
    assert name in refuse(folder)


def become_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def become_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def become_another_rank(path: Path) -> None:
    others = sorted(other for other in path.parent.iterdir() if other != path)
    path.write_bytes(others[-1].read_bytes())


def become_noise(path: Path) -> None:
    path.write_bytes(os.urandom(path.stat().st_size))


@pytest.mark.parametrize(
    "change", [Path.unlink, become_a_pipe, become_a_folder, become_another_rank, become_noise]
)
@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"])
def test_foreign_files(folder: Path, name: str, change: Callable[[Path], None]) -> None:
    change(step(folder) / name)
    assert name in refuse(folder)


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[1, 2]\n", b"\x80\x04pickle", b"{" * 100_000, b'{"format": "other"}', b"\0" * 4096],
)
def test_foreign_manifests(folder: Path, content: bytes) -> None:
    (step(folder) / "manifest.json").write_bytes(content)
    assert "manifest.json" in refuse(folder)
    sign(step(folder), content.removesuffix(b"}"))
    assert "manifest.json" in refuse(folder)


def put(*path: Any) -> Callable[[dict[str, Any]], None]:
    """Sets the value at a path of keys: ``put("slices", 0, "offset", 3)``."""
    *parents, key, value = path
    return lambda fields: reduce(getitem, parents, fields).__setitem__(key, value)


def drop(*path: Any) -> Callable[[dict[str, Any]], None]:
    return lambda fields: reduce(getitem, path[:-1], fields).__delitem__(path[-1])


def big_slice(fields: dict[str, Any]) -> dict[str, Any]:
    return next(record for record in fields["slices"] if record["crc32c"] and record["name"] == "big")


def unsharded_slice(fields: dict[str, Any]) -> dict[str, Any]:
    return next(record for record in fields["slices"] if record["kind"] == "left")


def in_slice(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda fields: big_slice(fields).__setitem__(key, value)


def in_unsharded(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda fields: unsharded_slice(fields).__setitem__(key, value)


def shift_slice(key: str, by: int) -> Callable[[dict[str, Any]], None]:
    return lambda fields: big_slice(fields).__setitem__(key, big_slice(fields)[key] + by)


HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "version 2": (put("version", 2), "version: expected 1, which this zero_ext reads, got 2"),
    "version NaN": (put("version", float("nan")), "expected JSON numbers, got NaN"),
    "version 1.0": (put("version", 1.0), "version: expected 1, which this zero_ext reads, got 1.0"),
    "version true": (put("version", True), "version: expected 1, which this zero_ext reads, got True"),
    "no version": (drop("version"), "version: expected 1, which this zero_ext reads, got None"),
    "format": (put("format", "pt"), "format: expected 'zero_ext checkpoint', got 'pt'"),
    "step text": (put("step", "5"), "step"),
    "step negative": (put("step", -1), "step"),
    "step infinite": (put("step", float("inf")), "Infinity"),
    "unknown key": (put("surprise", 1), "surprise"),
    "missing key": (drop("slices"), "slices"),
    "world size 0": (put("world_size", 0), "world_size"),
    "world size 3": (put("world_size", 3), "files: expected 3, one for each rank of the world size, got 2"),
    "chunk 0": (put("chunk_bytes", 0), "chunk_bytes"),
    "chunk odd": (put("chunk_bytes", 4097), "chunk_bytes"),
    "chunk huge": (put("chunk_bytes", 1 << 40), "chunk_bytes"),
    "chunk other": (put("chunk_bytes", 1 << 16), "checksums, one for each chunk"),
    "file up": (put("files", 0, "name", "../../etc/passwd"), "../../etc/passwd"),
    "file absolute": (put("files", 0, "name", "/etc/passwd"), "/etc/passwd"),
    "file twice": (put("files", 1, "name", "rank-00000.safetensors"), "the name 'rank-00001.safetensors'"),
    "file size": (put("files", 0, "bytes", 1 << 61), f"expected {1 << 61} bytes, got"),
    "header size": (put("files", 0, "header_bytes", 1), "expected its first byte at 1, where"),
    "header past end": (put("files", 0, "header_bytes", 1 << 61), "rank-00000"),
    "no files": (put("files", []), "one for each rank of the world size, got 0"),
    "shape negative": (put("parameters", "big", "shape", [-1]), "parameters.big.shape"),
    "shape float": (put("parameters", "big", "shape", [3e5]), "parameters.big.shape"),
    "shape larger": (put("parameters", "big", "shape", [300_001]), "big"),
    "shape smaller": (put("parameters", "big", "shape", [299_999]), "big"),
    "shape overflow": (put("parameters", "big", "shape", [1 << 40, 1 << 40]), "big"),
    "shape many": (put("parameters", "big", "shape", [1] * 100_000), "parameters.big.shape"),
    "stride short": (put("parameters", "conv", "stride", [1]), "stride: expected 4 numbers"),
    "stride overlap": (put("parameters", "conv", "stride", [1, 1, 1, 1]), "holes or overlaps"),
    "stride zero": (put("parameters", "big", "stride", [0]), "holes or overlaps"),
    "stride huge": (put("parameters", "big", "stride", [1 << 50]), "holes or overlaps"),
    "parameter dtype": (put("parameters", "big", "dtype", "float3"), "got 'float3'"),
    "alias twice": (put("parameters", "tied", "aliases", ["big"]), "'big': it is listed twice"),
    "parameter gone": (drop("parameters", "tied"), "no such parameter is listed"),
    "buffer gone": (drop("buffers", "mask"), "no such buffer is listed"),
    "buffer dtype": (put("buffers", "mask", "dtype", "uint8"), "uint8, the dtype of its buffer, got bool"),
    "buffer shape": (put("buffers", "mask", "shape", [8]), "elements 7 to 8 are not stored"),
    "slice dtype": (in_slice("dtype", "object"), "got 'object'"),
    "slice dtype width": (in_slice("dtype", "bfloat16"), "big"),
    "slice kind empty": (in_slice("kind", ""), "kind"),
    "slice kind": (in_slice("kind", "other"), "big"),
    "slice name": (in_slice("name", "nobody"), "no such parameter is listed"),
    "slice file": (in_slice("file", 2), "expected a file below 2, the number of files, got 2"),
    "slice file negative": (in_slice("file", -1), "file"),
    "slice empty": (in_slice("numel", 0), "end with its tensor of 300000, got 0"),
    "slice longer": (shift_slice("numel", 1), "big"),
    "slice shorter": (shift_slice("numel", -1), "big"),
    "slice earlier": (shift_slice("start", -1), "start"),
    "slice later": (shift_slice("start", 1), "big"),
    "slice moved": (shift_slice("offset", 4), "expected its first byte at"),
    "slice moved back": (shift_slice("offset", -4), "expected its first byte at"),
    "slice far": (in_slice("offset", 1 << 60), "expected an end within its file"),
    "slice twice": (
        lambda fields: fields["slices"].append(dict(big_slice(fields))),
        "expected its first byte at",
    ),
    "slice gone": (lambda fields: fields["slices"].remove(big_slice(fields)), "manifest.json"),
    "own shape of another size": (in_unsharded("shape", [4, 5]), "all 20 elements of shape [4, 5], got 16"),
    "own shape turned": (
        in_unsharded("shape", [16]),
        "left of 'factored': expected shape [4, 4], got shape [16]",
    ),
    "own shape gone": (in_unsharded("shape", None), "expected 1 to 12 elements"),
    "own shape negative": (in_unsharded("shape", [-4, -4]), "shape"),
    "own shape huge": (in_unsharded("shape", [1 << 61, 1 << 61]), "elements of shape"),
    "own shape many": (in_unsharded("shape", [1] * 100), "shape"),
    "own shape of a value": (in_unsharded("kind", "master"), "expected the shape that its table lists"),
    "own shape of a buffer": (in_unsharded("kind", "buffer"), "no such buffer is listed"),
    "own shape of nobody": (in_unsharded("name", "nobody"), "no such parameter is listed"),
    "own shape in part": (in_unsharded("start", 1), "all 16 elements of shape [4, 4]"),
    "own shape twice": (in_unsharded("kind", "steps"), "has a shape of its own and is stored twice"),
    "own dtype": (in_unsharded("dtype", "int32"), "expected torch.float32, got torch.int32"),
    "own and sharded": (in_unsharded("kind", "exp_avg"), "has a shape of its own and is stored twice"),
    "own of another kind": (in_unsharded("kind", "right"), "left of 'factored': it is not in the checkpoint"),
    "own shape for a slice": (in_slice("shape", [300_000]), "another shape [300000]"),
    "checksums short": (in_slice("crc32c", []), "checksums, one for each chunk, got 0"),
    "checksum range": (put("slices", 0, "crc32c", [1 << 32]), "crc32c"),
    "checksum wrong": (
        lambda fields: big_slice(fields)["crc32c"].insert(0, big_slice(fields)["crc32c"].pop(0) ^ 1),
        "damaged",
    ),
    "header checksum": (put("files", 1, "header_crc32c", 1), "table of tensors"),
    "a list": (lambda fields: [fields], "manifest.json"),
    "client mark": (put("client_state", {"$pickle": "gASV"}), "unknown mark '$pickle'"),
    "client float": (put("client_state", {"$float": "1; import os"}), "$float"),
    "client bytes": (put("client_state", {"$bytes": "%%%"}), "client_state"),
    "client tensor": (
        put("client_state", {"$tensor": {"dtype": "float32", "shape": [1 << 40], "data": ""}}),
        "expected the bytes of a torch.float32 tensor of shape [1099511627776], got 0",
    ),
    "client tensor shape": (
        put("client_state", {"$tensor": {"dtype": "float32", "shape": [-1], "data": ""}}),
        "tensor shape: expected a list of at most 64 sizes, got [-1]",
    ),
    "client dict": (put("client_state", {"$dict": [[[], 1]]}), "$dict"),
    "client beside": (put("client_state", {"$float": "nan", "x": 1}), "'$float' as the only key, got 2 keys"),
    "scalars list": (put("scalar_state", [1]), "scalar_state"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_manifests(folder: Path, case: str) -> None:
    change, named = HOSTILE[case]
    edit_manifest(step(folder), change)
    assert named in refuse(folder)


def test_json_that_readers_trip_over(folder: Path) -> None:
    body = (step(folder) / "manifest.json").read_bytes().rsplit(b",\n", 1)[0]
    for extra, named in (
        (b',\n"step": 5', "occurs twice"),
        (b',\n"x": ' + b"[" * 10**5 + b"]" * 10**5, "nested too deeply"),
        (b',\n"x": ' + b"[" * 900 + b"]" * 900, "x: Extra inputs"),
        (b',\n"x": 1' + b"0" * 5000, "not valid JSON"),
        (b',\n"x": 1e999', "x: Extra inputs"),
        (b',\n"x": "\xff"', "not valid JSON"),
        (b"}", "not valid JSON"),
    ):
        sign(step(folder), body + extra)
        assert named in refuse(folder)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "latest: expected a name like 'step-000123', got ''"),
        (b"../elsewhere", "got '../elsewhere'"),
        (b"step-000009\n", "expected a checkpoint step-000009, got step-000005"),
        (b"step-5", "got 'step-5'"),
        ("step-٠٠٠٠٠٥".encode(), "latest: expected a name like"),
        (b"\xff" * 1000, "latest: expected a name like"),
    ],
)
def test_strange_latest_files(folder: Path, content: bytes, named: str) -> None:
    (folder / "latest").write_bytes(content)
    assert named in refuse(folder)
    load_state(folder, FakeSource(TABLE, OTHER), step=STATE)


def test_nothing_there(tmp_path: Path) -> None:
    assert "holds no checkpoint" in refuse(tmp_path)
    assert "holds no checkpoint" in refuse(tmp_path / "absent")
    assert "expected a checkpoint step-000003, got none" in refuse(tmp_path, step=3)


@pytest.mark.parametrize("wanted", [-1, 1.0, "newest", True])
def test_strange_steps(folder: Path, wanted: Any) -> None:
    assert f'step: expected a step number or "latest", got {wanted!r}' in refuse(folder, step=wanted)


def without(name: str) -> dict[str, Any]:
    return {key: entry for key, entry in TABLE.items() if key != name}


def owned(**like: torch.Tensor) -> dict[str, Any]:
    kinds = {"master": torch.float32} if "exp_avg" in like else TABLE["factored"].kinds
    return TABLE | {"factored": dense(4, 3, kinds=kinds, unsharded=like)}


def kinds(name: str, **dtypes: torch.dtype) -> dict[str, Any]:
    return TABLE | {name: dense(*TABLE[name].shape, kinds=dtypes)}


@pytest.mark.parametrize(
    ("table", "named"),
    [
        (without("big"), "parameter 'big' is not in the model"),
        (TABLE | {"new": dense(3)}, "parameter 'new' is missing in the checkpoint"),
        (TABLE | {"big": dense(300_000, 1)}, "parameter 'big': expected shape [300000, 1], got [300000]"),
        (TABLE | {"conv": dense(4, 3, 2, 2)}, "'conv': expected stride [12, 4, 2, 1], got [12, 1, 6, 3]"),
        (TABLE | {"tied": dense(9)}, "parameter 'tied': expected the names tied, got alias, tied"),
        (without("tied") | {"tied": dense(9), "alias": dense(9)}, "'alias': expected the names alias, got"),
        (kinds("frozen", master=torch.bfloat16, exp_avg=torch.float32), "exp_avg of 'frozen': it is not in"),
        (kinds("big", master=torch.float32), "exp_avg of 'big': the checkpoint holds it, but the model asks"),
        (owned(left=torch.empty(4, 4)), "steps of 'factored': the checkpoint holds it, but the model asks"),
        (
            owned(left=torch.empty(4, 4), more=torch.empty(2)),
            "more of 'factored': it is not in the checkpoint",
        ),
        (owned(left=torch.empty(2, 8)), "left of 'factored': expected shape [2, 8], got shape [4, 4]"),
        (owned(left=torch.empty(4, 4, dtype=torch.int32)), "expected torch.int32, got torch.float32"),
        (owned(exp_avg=torch.empty(12)), "expected shape [12], got the parameter's shape"),
        (kinds("factored", left=torch.float32), "expected the parameter's shape, got shape [4, 4]"),
        (kinds("frozen", master=torch.int64), "expected torch.int64, got torch.bfloat16"),
    ],
)
def test_another_model(folder: Path, table: dict[str, Any], named: str) -> None:
    assert named in refuse(folder, FakeSource(table, OTHER))


def test_other_buffers(folder: Path) -> None:
    for change, named in (
        (lambda buffers: buffers.pop("mask"), "buffer 'mask' is not in the model"),
        (lambda buffers: buffers.update(more=torch.zeros(2)), "buffer 'more' is missing in the checkpoint"),
        (
            lambda buffers: buffers.update(mask=torch.zeros(2) > 0),
            "buffer 'mask': expected shape [2], got [7]",
        ),
        (
            lambda buffers: buffers.update(mask=torch.zeros(7)),
            "buffer 'mask': expected torch.float32, got bool",
        ),
    ):
        source = FakeSource(TABLE, OTHER)
        change(source.live_buffers)
        with pytest.raises(ValueError, match="does not fit this model") as caught:
            load_state(folder, source)
        assert named in str(caught.value)


def load_on_rank(world: World, directory: str) -> str:
    source = FakeSource(TABLE, OTHER, world.rank, world.size, world.group)
    try:
        load_state(directory, source)
    except CheckpointError as error:
        assert source.holds(OTHER)
        return str(error)
    return "loaded"


def test_damage_that_one_rank_sees_stops_all(rank_pool: RankPool, folder: Path) -> None:
    fields = json.loads((step(folder) / "manifest.json").read_text())
    last = max((p for p in fields["slices"] if p["name"] == "big"), key=lambda p: p["start"])
    path = step(folder) / fields["files"][last["file"]]["name"]
    flip(path, last["offset"] + 5, 3)
    answers = rank_pool.run(4, f"{MODULE}:load_on_rank", {"directory": str(folder)})
    assert len(set(answers)) == 1
    assert "rank 3" in answers[0]
    assert "rank 0:" not in answers[0]
    assert f"{path}: damaged: bytes {last['offset']} to" in answers[0]


def test_damage_between_the_two_reads_says_half_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill = loading._fill

    def damage_then_fill(reader: ChunkReader, plan: Any) -> None:
        path = step(folder) / "rank-00001.safetensors"
        with path.open("r+b") as file:  # in place: the reader has it open
            file.seek(-1, os.SEEK_END)
            last = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last[0] ^ 1]))
        fill(reader, plan)

    monkeypatch.setattr(loading, "_fill", damage_then_fill)
    source = FakeSource(TABLE, OTHER)
    with pytest.raises(CheckpointError, match=r"damaged: .*mixture of its old state and the checkpoint"):
        load_state(folder, source)
    assert source.finished == 0


def test_inspect_lists_all_damage(folder: Path) -> None:
    assert inspect_checkpoint(folder).damage == ()
    for name in ("rank-00000.safetensors", "rank-00001.safetensors"):
        flip(step(folder) / name, 9)
        flip(step(folder) / name, -1)
    damage = inspect_checkpoint(folder).damage
    assert len(damage) == 4
    assert sum("table of tensors" in text for text in damage) == 2
