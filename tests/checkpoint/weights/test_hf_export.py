"""Export: logical order, compute precision, shards and index as transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.checkpoint.boundaries import fail_at
from tests.checkpoint.fake_source import MIXED, SMALL, FakeSource, random_buffers, random_state
from tests.checkpoint.mutations import flip_in_master
from tests.multi.pool import RankPool
from tests.multi.rank import World
from zero_ext.checkpoint import CheckpointError, export_huggingface, save_state
from zero_ext.checkpoint.weights import hf_export

MODULE = "tests.checkpoint.weights.test_hf_export"


def expected(state: int, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """The model's state dict by torch's own strides and casts."""
    found = {}
    for name, entry in MIXED.items():
        flat = random_state(MIXED, state)["master", name]
        logical = torch.empty_strided(entry.shape, entry.stride, dtype=flat.dtype)
        torch.as_strided(logical, (entry.numel,), (1,)).copy_(flat)
        found[name] = logical.to(dtype or getattr(torch, entry.dtype))
    return found | random_buffers(state)


def check(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name], tensor), name


def save_on_rank(world: World, directory: str, state: int) -> None:
    save_state(directory, FakeSource(MIXED, state, world.rank, world.size, world.group))


def test_one_file(rank_pool: RankPool, tmp_path: Path, seed: int) -> None:
    rank_pool.run(3, f"{MODULE}:save_on_rank", {"directory": str(tmp_path / "run"), "state": seed})
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    assert export_huggingface(tmp_path / "run", tmp_path / "hf") == [tmp_path / "hf" / "model.safetensors"]
    check(load_file(tmp_path / "hf" / "model.safetensors"), expected(seed))
    with safe_open(tmp_path / "hf" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert {path.name for path in (tmp_path / "hf").iterdir()} == {"config.json", "model.safetensors"}


@pytest.mark.parametrize("dtype", [torch.float32, "float16", "bfloat16"])
def test_another_precision(tmp_path: Path, seed: int, dtype: torch.dtype | str) -> None:
    save_state(tmp_path / "run", FakeSource(MIXED, seed))
    export_huggingface(tmp_path / "run" / f"step-{seed:06d}", tmp_path / "hf", dtype)
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    check(load_file(tmp_path / "hf" / "model.safetensors"), expected(seed, wanted))


def test_weights_too_large_for_float16(tmp_path: Path) -> None:
    source = FakeSource(SMALL, 1)
    source.held["master", "a.weight"][7] = 70_000.0
    save_state(tmp_path / "run", source)
    with pytest.raises(ValueError, match=r"'a.weight': its values are beyond float16"):
        export_huggingface(tmp_path / "run", tmp_path / "hf", "float16")
    source.held["master", "a.weight"][7] = float("inf")
    save_state(tmp_path / "run", source)
    export_huggingface(tmp_path / "run", tmp_path / "hf", "float16")
    assert load_file(tmp_path / "hf" / "model.safetensors")["a.weight"][1, 0] == float("inf")


@pytest.mark.parametrize("limit", [1, 3000, 1_420_000])
def test_shards_and_index(tmp_path: Path, seed: int, limit: int) -> None:
    save_state(tmp_path / "run", FakeSource(MIXED, seed))
    paths = export_huggingface(tmp_path / "run", tmp_path / "hf", None, limit)
    shards, index = paths[:-1], json.loads(paths[-1].read_text())
    assert paths[-1].name == "model.safetensors.index.json"
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    assert [path.name for path in shards] == names
    found: dict[str, torch.Tensor] = {}
    for path in shards:
        tensors = load_file(path)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= limit or len(tensors) == 1
        assert {name for name, file in index["weight_map"].items() if file == path.name} == tensors.keys()
        found |= tensors
    check(found, expected(seed))
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in found.values())}


def test_an_earlier_export_is_not_mixed_with(tmp_path: Path) -> None:
    save_state(tmp_path / "run", FakeSource(SMALL, 1))
    export_huggingface(tmp_path / "run", tmp_path / "hf")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: it exists already"):
        export_huggingface(tmp_path / "run", tmp_path / "hf", None, 10)


def test_damage_stops_it_and_leaves_nothing(tmp_path: Path) -> None:
    save_state(tmp_path / "run", FakeSource(SMALL, 1))
    flip_in_master(tmp_path / "run" / "step-000001")
    with pytest.raises(CheckpointError, match="damaged: bytes"):
        export_huggingface(tmp_path / "run", tmp_path / "hf", None, 100)
    assert not list((tmp_path / "hf").iterdir())


def test_a_full_disk_at_any_point_leaves_no_half_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_state(tmp_path / "run", FakeSource(SMALL, 1))
    boundary, failed = 0, True
    while failed:
        out = tmp_path / f"hf{boundary}"
        filesystem = fail_at(boundary, 28, lambda name: not name.startswith("remove"))
        monkeypatch.setattr(hf_export, "Filesystem", lambda filesystem=filesystem: filesystem)
        try:
            export_huggingface(tmp_path / "run", out, None, 400)
            failed = False
        except OSError as error:
            assert error.errno == 28
            left = {path.name for path in out.iterdir()} if out.exists() else set()
            assert not any(name.startswith(".partial") for name in left)
            assert "model.safetensors.index.json" not in left or len(left) == 3
        boundary += 1
    assert boundary > 8


@pytest.mark.parametrize(
    "bad", [{"dtype": "int8"}, {"dtype": torch.bool}, {"max_shard_bytes": 0}, {"max_shard_bytes": 1e9}]
)
def test_bad_arguments(tmp_path: Path, bad: dict[str, object]) -> None:
    save_state(tmp_path / "run", FakeSource(SMALL, 1))
    with pytest.raises(ValueError, match=f"{next(iter(bad))}: expected .* got {next(iter(bad.values()))!r}"):
        export_huggingface(tmp_path / "run", tmp_path / "hf", **bad)  # type: ignore[arg-type]
    assert not (tmp_path / "hf").exists()
