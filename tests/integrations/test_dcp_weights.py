"""Checkpoints that torch.distributed.checkpoint wrote, into prepared models: the values that torch itself
reads from them, or an error and nothing changed."""

from __future__ import annotations

import itertools
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import metadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import zero_ext
from tests.checkpoint.test_engine_checkpoint import Mixture
from tests.checkpoint.weights.test_fill_weights import prepared
from tests.checkpoint.weights.test_load_weights import folders
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.checkpoint import CheckpointError
from zero_ext.checkpoint.state_slices import CheckpointSlice
from zero_ext.integrations import dcp_weights
from zero_ext.integrations.load_weights import open_weights

STAGES: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (3, {"params": "nvme"}),
    "fsdp2": (3, {}),
    "columns": (1, {"optimizer": "host"}),
}


def saved(world: World, folder: Path, how: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What torch reads from the checkpoint of a Mixture that it wrote ``how``."""
    torch.manual_seed(world.seed)
    source = Mixture().to(dtype)
    shapes = {name: torch.empty_like(value) for name, value in source.state_dict().items()}
    mesh = DeviceMesh.from_group(world.group, "cpu")
    if how == "fsdp2":
        source.conv.to(memory_format=torch.contiguous_format)  # as FSDP2 asks for
        for block in source.language.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(source, mesh=mesh)
    state = source.state_dict()
    if how == "columns":
        wide = {name: value for name, value in state.items() if value.dim() > 1}
        state |= {name: distribute_tensor(value, mesh, [Shard(1)]) for name, value in wide.items()}
    dcp.save({"model": state, "epoch": 3}, checkpoint_id=folder, process_group=world.group)
    found = {"model": shapes}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    return found["model"]


@on_ranks(1, 3, by_turns=True)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("how", STAGES)
def test_values_are_those_torch_reads(world: World, how: str, dtype: str) -> None:
    stage, offload = STAGES[how]
    with folders(world) as (folder, storage):
        wanted = saved(world, folder, how, torch.float32 if dtype == "fp32" else torch.bfloat16)
        torch.manual_seed(world.seed + 1)
        config = {"precision": {"dtype": dtype}}
        model, _ = prepared(world, Mixture(), storage, stage, offload=offload, config=config)
        with pytest.raises(ValueError, match=r"have the prefix 'model\.'.*strict=False"):
            zero_ext.load_weights(model, folder)
        with mock.patch.object(dcp_weights, "CHUNK_BYTES", 64):
            done = zero_ext.load_weights(model, folder, rename=lambda name: name.removeprefix("model."))
        assert done == ([], [])
        found = zero_ext.full_state_dict(model)
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(found[name], value), name


@on_ranks(2)
def test_tensors_that_are_no_weights_and_damage(world: World) -> None:
    with folders(world) as (folder, storage):
        source = nn.Linear(50, 30)
        state = {"model": source.state_dict(), "optim": {"exp_avg": torch.zeros(3)}}
        dcp.save(state, checkpoint_id=folder, process_group=world.group)
        model, _ = prepared(world, nn.Linear(50, 30), storage)
        names = {f"model.{name}": name for name in source.state_dict()}
        with pytest.raises(ValueError, match=r"lack \[\] and have \['optim.exp_avg'\]"):
            zero_ext.load_weights(model, folder, rename=names)
        assert zero_ext.load_weights(model, folder, rename={**names, "optim.exp_avg": None}) == ([], [])
        before = zero_ext.full_state_dict(model)
        if world.rank == 0:
            (file,) = folder.glob("*_0_0.distcp")
            content = bytearray(file.read_bytes())
            at = content.find(bytes(source.weight.detach().numpy().tobytes()[:64]))
            content[at] ^= 1
            file.write_bytes(content)
        world.barrier()
        with pytest.raises(CheckpointError, match=r"Bad CRC-32.*Nothing of the model was changed"):
            zero_ext.load_weights(model, folder, rename={**names, "optim.exp_avg": None})
        assert all(
            torch.equal(value, before[name]) for name, value in zero_ext.full_state_dict(model).items()
        )


def written(folder: Path) -> Path:
    """Tensors of every order in memory, in one process."""
    tensors = {
        "a": torch.arange(12.0).view(3, 4),
        "b": torch.arange(12.0).view(4, 3).t(),
        "c": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "d": torch.tensor(7),
        "e": torch.empty(0, 3),
        "f": torch.arange(9.0)[3:7].half(),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no process group
        dcp.save(tensors, checkpoint_id=folder)
    return folder


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor that ``load_weights`` finds in ``folder``."""
    source = open_weights(folder, None)
    found = {name: torch.empty(each.shape, dtype=each.dtype) for name, each in source.tensors.items()}
    wanted = {name: [CheckpointSlice("master", name, 0, each.view(-1))] for name, each in found.items()}
    source.verify(wanted, 0, 1)
    source.fill(wanted, mock.Mock())
    return found


def test_orders_in_memory(tmp_path: Path) -> None:
    found, wanted = read_all(written(tmp_path)), {}
    for name, each in found.items():
        wanted[name] = torch.empty_like(each)
    dcp.load(wanted, checkpoint_id=tmp_path, no_dist=True)
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    with pytest.raises(ValueError, match="step: expected None for a torch DCP checkpoint, got 3"):
        open_weights(tmp_path, 3)


class Call:
    """Pickles as a call of a function."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def chunks(table: Any, name: str) -> Any:
    return table.state_dict_metadata[name].chunks


def box(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> metadata.ChunkStorageMetadata:
    return metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def split(table: Any, first: Any, second: Any) -> None:
    """``a`` in two boxes, both stored where it is."""
    index = metadata.MetadataIndex("a", [0, 0])
    chunks(table, "a")[:] = [first, second]
    table.storage_data[metadata.MetadataIndex("a", second.offsets)] = table.storage_data[index]


def stored(table: Any, name: str) -> Any:
    return next(info for index, info in table.storage_data.items() if index.fqn == name)


def swap(table: Any) -> None:
    one, other = vars(stored(table, "a")), vars(stored(table, "f"))
    before = dict(one)
    one.update(other)
    other.update(before)


# A change of the table, and what is said of it.
FORGED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "overlap": (
        lambda table: split(table, box((0, 0), (2, 4)), box((1, 0), (1, 4))),
        r"'a': the chunks at \(0, 0\) and \(1, 0\) overlap",
    ),
    "overlap in columns": (
        lambda table: split(table, box((0, 0), (3, 3)), box((0, 2), (3, 1))),
        r"'a': the chunks at \(0, 0\) and \(0, 2\) overlap",
    ),
    "hole": (lambda table: split(table, box((0, 0), (1, 4)), box((2, 0), (1, 4))), "8 of 12 elements"),
    "outside": (
        lambda table: chunks(table, "a").__setitem__(0, box((0, 0), (3, 5))),
        "reaches outside shape",
    ),
    "nowhere": (lambda table: chunks(table, "a").__setitem__(0, box((1, 0), (2, 4))), "is stored nowhere"),
    "too many": (
        lambda table: chunks(table, "a").extend(chunks(table, "a") * 9),
        "more chunks than are stored",
    ),
    "dimensions": (lambda table: chunks(table, "a").__setitem__(0, box((0,), (3,))), "number of dimensions"),
    "folder": (
        lambda table: vars(stored(table, "a")).update(relative_path="../x"),
        "file of the same folder",
    ),
    "missing file": (
        lambda table: vars(stored(table, "a")).update(relative_path="x"),
        "x: it cannot be read",
    ),
    "past the end": (
        lambda table: vars(stored(table, "a")).update(offset=1 << 40),
        "'a' in bytes 1099511627776 to",
    ),
    "no archive": (
        lambda table: vars(stored(table, "a")).update(offset=1),
        r"before the archive. \('a' at \(0, 0\)\)",
    ),
    "negative": (
        lambda table: vars(stored(table, "a")).update(offset=-1),
        "expected a number from 0, got -1",
    ),
    "short": (lambda table: vars(stored(table, "a")).update(length=47), "has only 47 bytes"),
    "transforms": (
        lambda table: vars(stored(table, "a")).update(transform_descriptors=["zstd"]),
        "stream transforms",
    ),
    "other tensor": (swap, r"expected torch.float32 of \(3, 4\), got .*"),
    "dtype": (
        lambda table: setattr(table.state_dict_metadata["a"].properties, "dtype", torch.int32),
        "expected torch.int32 of .*FloatStorage",
    ),
    "no table": (
        lambda table: {"a": 1},
        "expected a torch.distributed.checkpoint.metadata.Metadata, got a Pairs",
    ),
}


def edited(folder: Path, edit: Callable[[Any], Any]) -> Path:
    path = folder / ".metadata"
    table = pickle.loads(path.read_bytes())
    path.write_bytes(pickle.dumps(edit(table) or table))
    return folder


@pytest.mark.parametrize("case", FORGED)
def test_forged_tables(case: str, tmp_path: Path) -> None:
    edit, pattern = FORGED[case]
    with pytest.raises(CheckpointError, match=pattern):
        read_all(edited(written(tmp_path), edit))


def test_no_code_runs(tmp_path: Path) -> None:
    folder, made = written(tmp_path / "saved"), tmp_path / "made"
    edited(folder, lambda table: setattr(table, "planner_data", Call(made)))
    with pytest.raises(CheckpointError, match=r"\.metadata: refused: .* it calls 'posix.mkdir'.*HuggingFace"):
        open_weights(folder, None)
    assert not made.exists()


@pytest.mark.parametrize("by_name", [False, True])
def test_members_of_enums(by_name: bool, tmp_path: Path) -> None:
    """Early releases of Python 3.11, as 3.11.2, write them by name, others by value."""

    def reduced(member: Any, protocol: int) -> tuple[Any, tuple[Any, ...]]:
        return (getattr, (type(member), member.name)) if by_name else (type(member), (member.value,))

    with mock.patch.object(metadata._MEM_FORMAT_ENCODING, "__reduce_ex__", reduced):
        folder = written(tmp_path)
    assert (b"getattr" in (folder / ".metadata").read_bytes()) == by_name
    assert torch.equal(read_all(folder)["a"], torch.arange(12.0).view(3, 4))


def test_attributes_of_other_classes_are_refused(tmp_path: Path) -> None:
    class Call:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            return getattr, (Path, "cwd")

    folder = written(tmp_path)
    edited(folder, lambda table: setattr(table, "planner_data", Call()))
    with pytest.raises(CheckpointError, match=r"\.metadata: refused: .* it calls 'pathlib.Path'"):
        open_weights(folder, None)


def test_names_that_grow(tmp_path: Path) -> None:
    """Each of the steps would double a name."""
    steps = b"".join(b"h" + bytes([each]) + b"h" + bytes([each]) + b"\x93\x94" for each in range(40))
    (tmp_path / ".metadata").write_bytes(b"\x80\x04\x8c\x08aaaaaaaa\x94" + steps + b".")
    with pytest.raises(CheckpointError, match="something other than two short strings"):
        open_weights(tmp_path, None)


def test_too_many_boxes_to_compare(tmp_path: Path) -> None:
    shape, ones = (2,) * 13, (1,) * 13
    folder = written(tmp_path)
    table = pickle.loads((folder / ".metadata").read_bytes())
    entry, info = table.state_dict_metadata["a"], stored(table, "a")
    offsets = list(itertools.product((0, 1), repeat=13))
    entry.size, entry.chunks = torch.Size(shape), [box(each, ones) for each in offsets]
    table.storage_data |= {metadata.MetadataIndex("a", torch.Size(each)): info for each in offsets}
    (folder / ".metadata").write_bytes(pickle.dumps(table))
    with pytest.raises(CheckpointError, match="'a': it is cut into too many chunks"):
        open_weights(folder, None)


@pytest.mark.parametrize("size", [0, 1, 40, 500, -1])
def test_truncated_tables(size: int, tmp_path: Path) -> None:
    path = written(tmp_path) / ".metadata"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=r"\.metadata: refused"):
        open_weights(tmp_path, None)


def test_load_checkpoint_names_load_weights(tmp_path: Path) -> None:
    model, _ = zero_ext.prepare(nn.Linear(3, 3), None, {"stage": 3})
    with pytest.raises(CheckpointError, match=r"holds no checkpoint.*zero_ext.load_weights"):
        zero_ext.load_checkpoint(written(tmp_path), model)
