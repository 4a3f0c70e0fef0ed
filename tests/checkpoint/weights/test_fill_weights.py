"""Hugging Face weights into prepared models: the values of plain loading, for every tier, or an error and
nothing changed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import struct
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import zero_ext
from tests.checkpoint.test_engine_checkpoint import Mixture, batch_of
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import TinyModel, language_batch, language_loss
from zero_ext import ops
from zero_ext.checkpoint import CheckpointError, chunk_reader
from zero_ext.checkpoint.format.tensor_files import find_weights, read_header
from zero_ext.checkpoint.weights import weight_sources
from zero_ext.zero import engine_of
from zero_ext.zero.api.engine_lookup import checkpoint_sources
from zero_ext.zero.units import master_weights

NVME = {"params": "nvme", "grads": "host", "optimizer": "nvme"}
TIERS: list[tuple[int, dict[str, Any]]] = [
    (0, {}),
    (1, {"optimizer": "nvme"}),
    (2, {"optimizer": "host"}),
    (3, {}),
    (3, {"params": "host", "optimizer": "host"}),
    (3, {"params": "nvme"}),
    (3, NVME),
]


def prepared(world: World, model: nn.Module, folder: str, stage: int = 3, **more: Any) -> tuple[Any, Any]:
    offload = dict(more.pop("offload", {}))
    if "nvme" in offload.values():
        offload |= {"nvme_paths": [folder], "staging_buffer_bytes": 1 << 20}
    config = {"stage": stage, "timeout_seconds": 120.0, "offload": offload, **more.pop("config", {})}
    config |= {"units": {"bucket_elements": 300, **more.pop("units", {})}}
    optimizer = more.pop("optimizer", True)
    trained = [p for p in model.parameters() if p.requires_grad]
    made = torch.optim.AdamW(trained, lr=1e-2) if optimizer else None
    return zero_ext.prepare(model, made, config, process_group=world.group, **more)


def write_weights(folder: Path, tensors: Mapping[str, torch.Tensor], files: int = 1) -> Path:
    """As ``save_pretrained`` does, in ``files`` files, without the second of tied names."""
    seen: set[int] = set()
    own = {}
    for name, value in tensors.items():
        if value.data_ptr() not in seen or not value.numel():
            own[name] = value.contiguous()
        seen.add(value.data_ptr())
    if files == 1:
        save_file(own, folder / "model.safetensors", {"format": "pt"})
        return folder
    names = [f"model-{number + 1:05d}-of-{files:05d}.safetensors" for number in range(files)]
    for number, name in enumerate(names):
        save_file({key: own[key] for key in list(own)[number::files]}, folder / name)
    placed = {key: names[number % files] for number, key in enumerate(own)}
    index = {"metadata": {"total_size": 1}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@contextlib.contextmanager
def weights(world: World, tensors: Mapping[str, torch.Tensor], files: int = 1) -> Iterator[tuple[Path, str]]:
    """A folder with ``tensors``, the same for all ranks, and one of this rank's own for its storage."""
    with tempfile.TemporaryDirectory() as shared, tempfile.TemporaryDirectory() as own:
        folder = Path(world.everyone(shared)[0])
        if world.rank == 0:
            write_weights(folder, tensors, files)
        world.barrier()
        yield folder, own
        world.barrier()


def masters(model: Any) -> dict[tuple[str, int], list[float]]:
    state = checkpoint_sources(engine_of(model)).own
    return {
        (p.name, p.start): p.tensor[:].tolist()
        if isinstance(p.tensor, torch.Tensor)
        else p.tensor.read(0, p.tensor.numel).tolist()
        for p in state.load_slices()
        if p.kind == "master"
    }


def values_of(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The model's own tensors, tied ones in one memory, floats in ``dtype``."""
    made: dict[int, torch.Tensor] = {}
    for value in model.state_dict(keep_vars=True).values():
        plain = value.detach()
        made.setdefault(id(value), plain.to(dtype) if plain.is_floating_point() else plain.clone())
    return {name: made[id(value)] for name, value in model.state_dict(keep_vars=True).items()}


def check_loaded(world: World, stage: int, offload: dict[str, Any], stored: str, compute: str) -> None:
    torch.manual_seed(world.seed)
    source = Mixture()
    tensors = values_of(source, getattr(torch, stored))
    config = {"precision": {"dtype": compute}}
    with weights(world, tensors, files=1 + world.seed % 3) as (folder, storage):
        plain = Mixture()
        plain.load_state_dict(tensors)
        wanted, _ = prepared(world, plain, storage, stage, offload=offload, config=config)
        torch.manual_seed(world.seed + 1)
        model, optimizer = prepared(world, Mixture(), storage, stage, offload=offload, config=config)
        with (
            mock.patch.object(weight_sources, "CHUNK_BYTES", 64),
            mock.patch.object(master_weights, "_CHUNK_ELEMENTS", 100),
        ):
            assert zero_ext.load_weights(model, folder, strict=False) == ([], [])
        assert masters(model) == masters(wanted)
        found, expected = zero_ext.full_state_dict(model), zero_ext.full_state_dict(wanted)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), f"{name} differs"
        assert engine_of(model).optimizer_step.damage is None
        losses = []
        for each in (model, wanted):
            torch.manual_seed(world.seed)  # dropout
            losses.append(each(*batch_of(world, world.seed, 0)))
        assert losses[0].item() == losses[1].item()
        losses[0].backward()
        optimizer.step()


@on_ranks(1, 2, 3, by_turns=True)
@pytest.mark.parametrize("number", range(len(TIERS)))
def test_the_values_of_plain_loading(world: World, number: int) -> None:
    stage, offload = TIERS[number]
    dtypes = ("float32", "bfloat16", "float16", "float64")
    check_loaded(world, stage, offload, dtypes[(number + world.size) % 4], "fp32")
    check_loaded(world, stage, offload, dtypes[(number + world.seed) % 4], "bf16")


@on_ranks(1, 2)
@pytest.mark.parametrize("tiles", [{}, {"embedding": 4, "head": 4}])
def test_from_the_meta_device(world: World, tiles: dict[str, int]) -> None:
    torch.manual_seed(world.seed)
    source = TinyModel(tied=True)
    with weights(world, values_of(source, torch.float32), files=2) as (folder, storage):
        config = {"precision": {"dtype": "bf16"}}
        for offload in ({}, {"params": "host"}, NVME):
            more: dict[str, Any] = {"offload": offload, "config": config, "units": {"tiles": tiles}}
            with torch.device("meta"):
                meta = TinyModel(tied=True)
            model, optimizer = prepared(world, meta, storage, init="skip", **more)
            assert zero_ext.load_weights(model, folder) == ([], [])
            torch.manual_seed(world.seed)
            plain = TinyModel(tied=True)
            plain.load_state_dict(source.state_dict())
            wanted, other = prepared(world, plain, storage, **more)
            assert masters(model) == masters(wanted)
            for step in range(2):
                losses = []
                for each, stepped in ((model, optimizer), (wanted, other)):
                    losses.append(language_loss(each, language_batch(world.seed, step, 0, world.rank)))
                    losses[-1].backward()
                    stepped.step()
                    stepped.zero_grad()
                assert losses[0].item() == losses[1].item()


@on_ranks(1, 2)
def test_without_optimizer_and_with_other_names(world: World) -> None:
    torch.manual_seed(world.seed)
    source = TinyModel(tied=True)
    tensors = values_of(source, torch.bfloat16)
    renamed = {f"model.{name}": value for name, value in tensors.items() if name != "embedding.weight"}
    with weights(world, renamed) as (folder, storage):
        for offload in ({}, {"params": "nvme"}):
            config = {"precision": {"dtype": "bf16"}}
            model, _ = prepared(
                world, TinyModel(tied=True), storage, offload=offload, optimizer=False, config=config
            )
            before = zero_ext.full_state_dict(model)
            with pytest.raises(ValueError, match=r"lack \['embedding.weight'.*have \['model.blocks"):
                zero_ext.load_weights(model, folder)
            with pytest.raises(ValueError, match=r"rename: .* got 'x' for both"):
                zero_ext.load_weights(model, folder, rename=lambda name: "x")
            for name, value in zero_ext.full_state_dict(model).items():
                assert torch.equal(value, before[name])
            assert zero_ext.load_weights(model, folder, rename=lambda name: name[6:]) == ([], [])
            for name, value in zero_ext.full_state_dict(model).items():
                assert torch.equal(value, tensors[name]), name
            table = {f"model.{name}": name for name in tensors if "norm" not in name}
            missing, unexpected = zero_ext.load_weights(
                model, folder / "model.safetensors", strict=False, rename=table
            )
            assert "norm.weight" in missing and "model.norm.weight" in unexpected


@on_ranks(2)
def test_each_rank_reads_its_own_bytes_in_bounded_chunks(world: World) -> None:
    source = nn.Sequential(*(nn.Linear(300, 300, bias=False) for _ in range(4)))
    content = 4 * 300 * 300 * 4
    with weights(world, values_of(source, torch.float32)) as (folder, storage):
        model, _ = prepared(world, source, storage, offload=NVME)
        sizes: list[int] = []
        read_some = chunk_reader.ChunkReader._read_some

        def counting(self: Any, file: int, views: list[memoryview], offset: int) -> int:
            sizes.append(sum(len(view) for view in views))
            return read_some(self, file, views, offset)

        with (
            mock.patch.object(chunk_reader.ChunkReader, "_read_some", counting),
            mock.patch.object(weight_sources, "CHUNK_BYTES", 1 << 16),
            mock.patch.object(chunk_reader, "_BATCH_BYTES", 1 << 16),
        ):
            zero_ext.load_weights(model, folder)
        assert sum(world.everyone(sum(sizes))) == content
        assert sum(sizes) <= content // 2 + 4 * 8192 and max(sizes) <= 1 << 16


@on_ranks(1, 2)
def test_what_does_not_fit_changes_nothing(world: World) -> None:
    torch.manual_seed(world.seed)
    tensors = values_of(TinyModel(), torch.float32)
    wrong: list[tuple[dict[str, torch.Tensor | None], str]] = [
        ({"norm.bias": None}, r"lack \['norm.bias'\] and have \[\]"),
        ({"more": torch.ones(2)}, r"lack \[\] and have \['more'\]"),
        ({"norm.bias": torch.ones(13)}, r"'norm.bias': expected shape \(12,\), got \(13,\)"),
        ({"norm.bias": torch.ones(12, dtype=torch.int32)}, "expected torch.float32, got torch.int32"),
    ]
    for changes, pattern in wrong:
        changed = {name: value for name, value in (tensors | changes).items() if value is not None}
        with weights(world, changed) as (folder, storage):
            model, _ = prepared(world, TinyModel(), storage)
            before = zero_ext.full_state_dict(model)
            with pytest.raises(ValueError, match=pattern):
                zero_ext.load_weights(model, folder)
            for name, value in zero_ext.full_state_dict(model).items():
                assert torch.equal(value, before[name])


@on_ranks(2)
def test_one_rank_that_cannot_read_the_table(world: World) -> None:
    with weights(world, values_of(TinyModel(), torch.float32)) as (folder, storage):
        model, optimizer = prepared(world, TinyModel(), storage)
        if world.rank == 1:
            folder = Path(storage) / "elsewhere"
        with pytest.raises(CheckpointError, match=r"rank 1: .*elsewhere.*No such file.*Nothing of the model"):
            zero_ext.load_weights(model, folder)
        own = Path(storage)
        write_weights(own, values_of(TinyModel(layers=3 + world.rank), torch.float32))
        with pytest.raises((CheckpointError, ValueError), match=r"different files|have .*'blocks.3"):
            zero_ext.load_weights(model, own, strict=bool(world.rank))
        language_loss(model, language_batch(world.seed, 0, 0, world.rank)).backward()
        optimizer.step()


@on_ranks(1, 2)
@pytest.mark.parametrize("fault", ["file", "storage"])
def test_a_failure_after_partial_loading_is_raised_on_all_ranks(world: World, fault: str) -> None:
    torch.manual_seed(world.seed)
    with weights(world, values_of(TinyModel(), torch.float32)) as (folder, storage):
        model, _ = prepared(world, TinyModel(), storage, offload=NVME)
        broken: Any = contextlib.nullcontext()
        if world.rank == 0 and fault == "file":
            reason = OSError(errno.EIO, os.strerror(errno.EIO))
            broken = mock.patch.object(chunk_reader.os, "preadv", side_effect=reason)
        elif world.rank == 0:
            ops.store_inject_fault(engine_of(model).tiers.store.handle, True, 1, -errno.EIO, 1)
        with broken, pytest.raises(CheckpointError, match=r"rank 0: .*Input/output error.*only in part"):
            zero_ext.load_weights(model, folder)
        with pytest.raises(RuntimeError, match="loaded only in part"):
            model(language_batch(world.seed, 0, 0, world.rank))
        zero_ext.load_weights(model, folder, strict=False, rename={"norm.bias": "elsewhere"})
        with pytest.raises(RuntimeError, match="loaded only in part"):
            model(language_batch(world.seed, 0, 0, world.rank))
        assert zero_ext.load_weights(model, folder) == ([], [])
        assert language_loss(model, language_batch(world.seed, 0, 0, world.rank)).isfinite()


@on_ranks(1)
def test_after_a_failed_step_weights_alone_do_not_do(world: World) -> None:
    with weights(world, values_of(TinyModel(), torch.float32)) as (folder, storage):
        model, _ = prepared(world, TinyModel(), storage)
        engine_of(model).optimizer_step.damage = "the step broke off"
        with pytest.raises(CheckpointError, match=r"damaged: the step broke off.* Load a checkpoint first"):
            zero_ext.load_weights(model, folder)


# -- files that others wrote ---------------------------------------------------------------------------------


def container(table: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


HOSTILE: list[tuple[bytes, str]] = [
    (b"", "a table of 0 bytes in a file of 0"),
    (b"\2\0\0", "in a file of 3"),
    (struct.pack("<Q", 1 << 63), "a table of 9223372036854775808 bytes"),
    (container({}, length=3), "a table of 3 bytes in a file of 10"),
    (container(b"[]"), "damaged: expected a table of names, got list"),
    (container(b"{]"), "damaged"),
    (container(b"\xff\xfe{}"), "damaged"),
    (container(b"[" * 100_000), "damaged"),
    (container(b'{"a":1,"a":2}'), "a name occurs twice"),
    (container({"a": 1}), "'a' is not described"),
    (container({"a": entry(more=1)}, bytes(8)), "'a' is not described"),
    (container({"a": entry(dtype="F8_E4M3")}, bytes(8)), "dtype of 'a': .* F64,.*, got 'F8_E4M3'"),
    (container({"a": entry(dtype=["F32"])}, bytes(8)), "dtype of 'a': expected"),
    (container({"a": entry(shape=(-2, -1))}, bytes(8)), "shape of 'a': expected a list of numbers from 0"),
    (container({"a": entry(shape=(True, 2))}, bytes(8)), "shape of 'a': expected a list of numbers from 0"),
    (container({"a": entry(shape=(2.0,))}, bytes(8)), "shape of 'a': expected a list of numbers from 0"),
    (container({"a": entry(shape="2")}, bytes(8)), "shape of 'a': expected a list of numbers from 0"),
    (container({"a": entry(shape=(1 << 62, 1 << 62))}, bytes(8)), "data_offsets of 'a': expected"),
    (container({"a": entry(shape=[9999999999] * 400_000)}, bytes(8)), "at most 64 numbers, got 400000"),
    (container({"a": entry(offsets=(8, 0))}, bytes(8)), r"expected 8 bytes, .* got \[8, 0\]"),
    (container({"a": entry(offsets=(0, 8, 16))}, bytes(8)), r"8 bytes, .* got \[0, 8, 16\]"),
    (container({"a": entry(offsets=(-8, 0))}, bytes(8)), r"offsets of 'a': .* from 0, got \[-8, 0\]"),
    (container({"a": entry()}, bytes(7)), r"tensors at byte \d+, the end of the file, got \d+\."),
    (container({"a": entry()}, bytes(9)), "expected the end of the tensors at byte"),
    (container({"a": entry(), "b": entry()}, bytes(8)), "'b': expected its first byte at"),
    (container({"a": entry(offsets=(4, 12))}, bytes(12)), "'a': expected its first byte at"),
]


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_hostile_tables_are_refused(tmp_path: Path, number: int) -> None:
    data, pattern = HOSTILE[number]
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=pattern) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_changed_byte_is_refused_or_read_as_what_it_says(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(3), "b": torch.zeros(2, 2, dtype=torch.int64)}, path)
    content = bytearray(path.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    with contextlib.suppress(CheckpointError):
        found = read_header(path)
        end = max((tensor.offset + tensor.entry.nbytes for tensor in found), default=len(content))
        assert end == len(content)


def test_an_index_cannot_lead_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "secret.safetensors")
    save_file({"a": torch.ones(1)}, folder / "one.safetensors")
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, folder / "two.safetensors")
    index = folder / "model.safetensors.index.json"
    wrong: list[tuple[Any, str]] = [
        ({"weight_map": {"a": "../secret.safetensors"}}, r"file of 'a': .* got '../secret"),
        ({"weight_map": {"a": str(tmp_path / "secret.safetensors")}}, "of the same folder, got '/"),
        ({"weight_map": {"a": "pytorch_model.bin"}}, "of the same folder, got 'pytorch_model"),
        ({"weight_map": {"a": 3}}, "of the same folder, got 3"),
        ({"weight_map": {"z": "one.safetensors"}}, r"one.safetensors: 'z' is not in it"),
        ({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}, "'a' is in another file"),
        ({"weight_map": {"a": "three.safetensors"}}, "three.safetensors: it cannot be read: No such file"),
        ({"weight_map": {}}, "no 'weight_map'"),
        ([], "no 'weight_map'"),
    ]
    for content, pattern in wrong:
        index.write_text(json.dumps(content))
        for path in (folder, index):
            with pytest.raises(CheckpointError, match=pattern):
                find_weights(path)
    index.write_text("{")
    with pytest.raises(CheckpointError, match="not an index"):
        find_weights(folder)
    index.unlink()
    with pytest.raises(CheckpointError, match=r"model.safetensors or .* in it, got \['one.safetensors'"):
        find_weights(folder)
    os.mkfifo(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="not a regular file"):
        find_weights(folder)
