"""Weights of prepared models in files, written a tensor at a time: those of the state dict, or none."""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import zero_ext
from tests.checkpoint.test_engine_checkpoint import Mixture
from tests.checkpoint.weights.test_fill_weights import NVME, prepared
from tests.checkpoint.weights.test_load_weights import folders
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import TinyModel
from zero_ext.checkpoint.files import Filesystem
from zero_ext.checkpoint.weights import save_weights as module
from zero_ext.zero.units.collective_errors import CollectiveError

TIERS: list[tuple[int, dict[str, Any]]] = [(0, {}), (2, {}), (3, {}), (3, {"params": "host"}), (3, NVME)]


def read(folder: Path) -> dict[str, torch.Tensor]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return load_file(folder / "model.safetensors")
    placed = json.loads(index.read_text())["weight_map"]
    return {name: load_file(folder / file)[name] for name, file in placed.items()}


@on_ranks(1, 2, 3, by_turns=True)
@pytest.mark.parametrize("number", range(len(TIERS)))
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_files_hold_the_state_dict(world: World, number: int, dtype: str) -> None:
    stage, offload = TIERS[number]
    torch.manual_seed(world.seed)
    config = {"precision": {"dtype": dtype}}
    with folders(world) as (folder, storage):
        model, _ = prepared(world, Mixture(), storage, stage, offload=offload, config=config)
        wanted = zero_ext.full_state_dict(model)
        for most_bytes in (1 << 30, 2000, 1):
            written = zero_ext.save_weights(model, folder / "new", max_file_bytes=most_bytes)
            assert bool(written) == (world.rank == 0)
            world.barrier()
            found = read(folder / "new")
            assert found.keys() == wanted.keys() - {"language.head.weight"}
            for name, value in found.items():
                assert value.dtype == wanted[name].dtype and torch.equal(value, wanted[name]), name
            names = {path.name for path in (folder / "new").iterdir()}
            assert world.rank or names == {path.name for path in written}
            world.barrier()
        assert zero_ext.load_weights(model, folder / "new") == ([], [])
        streamed = {name: value.clone() for name, value in zero_ext.stream_weights(model)}
        assert streamed.keys() == found.keys()
        assert all(torch.equal(value.cpu(), found[name]) for name, value in streamed.items())


@on_ranks(1, 2)
def test_tiles_are_one_tensor(world: World) -> None:
    with folders(world) as (folder, storage):
        units = {"tiles": {"embedding": 4, "head": 4}}
        model, _ = prepared(world, TinyModel(), storage, units=units)
        zero_ext.save_weights(model, folder)
        world.barrier()
        wanted, found = zero_ext.full_state_dict(model), read(folder)
        assert found.keys() == wanted.keys() == TinyModel().state_dict().keys()
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


def fails_the_second_time() -> Any:
    plain, calls = Filesystem.rename, itertools.count()

    def rename(self: Filesystem, path: Path, target: Path) -> None:
        if next(calls) == 1:
            raise OSError(5, "Input/output error")
        plain(self, path, target)

    return rename


@on_ranks(1, 2)
def test_a_failed_write_is_an_error_on_all_ranks_and_leaves_what_was_there(world: World) -> None:
    with folders(world) as (folder, storage):
        torch.manual_seed(world.seed)
        model, _ = prepared(world, TinyModel(), storage)
        zero_ext.save_weights(model, folder)
        world.barrier()
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        world.barrier()
        full = OSError(28, "No space left on device")
        for broken in ("make_directory", "write_file"):
            with (
                mock.patch.object(Filesystem, broken, side_effect=full),
                pytest.raises(CollectiveError, match=r"writing weights to .* failed on ranks \[0\]"),
            ):
                zero_ext.save_weights(model, folder, max_file_bytes=500)
            world.barrier()
            assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
            world.barrier()
        with (
            mock.patch.object(Filesystem, "rename", fails_the_second_time()),
            pytest.raises(CollectiveError, match="failed on ranks"),
        ):
            zero_ext.save_weights(model, folder, max_file_bytes=500)
        world.barrier()
        left = {path.name.removeprefix(".partial-") for path in folder.iterdir()}
        assert left > before.keys() and "model.safetensors.index.json" in left  # all that is new, and the old
        world.barrier()
        zero_ext.save_weights(model, folder)  # and the ranks are still in step


@on_ranks(2)
def test_nobody_holds_more_than_a_tensor(world: World) -> None:
    """Of what is not on the device, which is the CPU here: the largest live tensor that the writer makes."""
    with folders(world) as (folder, storage):
        blocks = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
        model, _ = prepared(world, blocks, storage, offload=NVME, units={"bucket_elements": 64 * 64})
        live: list[int] = []
        plain = module._Values._chunks

        def counting(self: Any, number: int, name: str) -> Any:
            for chunk in plain(self, number, name):
                live.append(sum(value.numel() for value in self._made.values()))
                yield chunk

        with mock.patch.object(module._Values, "_chunks", counting):
            zero_ext.save_weights(model, folder)
        assert set(live) == ({64 * 64} if world.rank == 0 else set())


def test_what_is_written_to_while_it_is_streamed() -> None:
    model, _ = zero_ext.prepare(nn.Linear(2, 2), None, {"stage": 3})
    with pytest.raises(RuntimeError, match="'weight': expected that it is only read, got a write"):
        for _, value in zero_ext.stream_weights(model):
            value.mul_(2)
    with pytest.raises(ValueError, match="expected a prepared one"):
        zero_ext.stream_weights(nn.Linear(2, 2))  # before the first is asked for


@pytest.mark.parametrize("most_bytes", [0, -1, "5GB", 1.5])
def test_sizes_of_files_are_checked_first(tmp_path: Path, most_bytes: Any) -> None:
    model, _ = zero_ext.prepare(nn.Linear(2, 2), None, {"stage": 3})
    with pytest.raises(ValueError, match="max_file_bytes: expected a number from 1"):
        zero_ext.save_weights(model, tmp_path / "new", max_file_bytes=most_bytes)
    assert not (tmp_path / "new").exists()


def test_what_does_not_fit_into_files(tmp_path: Path) -> None:
    odd = nn.Linear(2, 2)
    odd.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
    model, _ = zero_ext.prepare(odd, None, {"stage": 3})
    with pytest.raises(ValueError, match=r"phase: expected a dtype of safetensors, got torch.complex64"):
        zero_ext.save_weights(model, tmp_path)
    model, _ = zero_ext.prepare(nn.Linear(2, 2), None, {"stage": 3})
    (tmp_path / "file").touch()
    with pytest.raises(CollectiveError, match="expected a folder, got a file"):
        zero_ext.save_weights(model, tmp_path / "file")


def test_a_module_that_was_removed(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    zero_ext.prepare(model, None, {"stage": 3}, wrap=False)
    del model[1]
    zero_ext.save_weights(model, tmp_path)
    assert read(tmp_path).keys() == zero_ext.full_state_dict(model).keys() == {"0.weight", "0.bias"}


def test_other_files_stay(tmp_path: Path) -> None:
    model, _ = zero_ext.prepare(nn.Linear(2, 2), None, {"stage": 3})
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        other = Path(folder) / "model_of_mine.safetensors"
        other.write_bytes(b"mine")
        (Path(folder) / "model-00001-of-00002.safetensors").write_bytes(b"old")
        zero_ext.save_weights(model, folder)
        assert sorted(path.name for path in Path(folder).iterdir()) == ["model.safetensors", other.name]
