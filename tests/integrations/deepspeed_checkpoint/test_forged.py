"""Checkpoints in DeepSpeed's format of every shape and kind, and those that are damaged, mixed or hostile."""

from __future__ import annotations

import argparse
import itertools
import os
import pickle
import re
import shutil
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.deepspeed_checkpoint.forged import Forged, fragment_address
from zero_ext.checkpoint import CheckpointError, inspect_checkpoint
from zero_ext.checkpoint.format.json_state import decode
from zero_ext.checkpoint.inspection import open_checkpoint
from zero_ext.integrations.deepspeed.checkpoint_io.checkpoint_import import import_deepspeed_checkpoint
from zero_ext.integrations.deepspeed.checkpoint_io.checkpoint_weights import (
    convert_zero_checkpoint_to_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)

OPTIM, MODEL = "zero_pp_rank_{}_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"


def stored(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a zero_ext checkpoint whole and 1-D, by kind and name, read with safetensors itself."""
    from safetensors.torch import load_file

    path, manifest = open_checkpoint(directory)
    files = [load_file(path / entry.name) for entry in manifest.files]
    slices_by_key: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for record in manifest.slices:
        values = files[record.file][f"{record.name}:{record.kind}:{record.start}"]
        slices_by_key.setdefault(f"{record.kind} {record.name}", []).append((record.start, values))
    return {
        key: torch.cat([values for _, values in sorted(by_start, key=lambda item: item[0])])
        for key, by_start in slices_by_key.items()
    }


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_element_is_imported_in_order(tmp_path: Path, stage: int, ranks: int) -> None:
    forged = Forged(stage, ranks, alignment=(1, 4)[(stage + ranks) % 2])
    forged.write(tmp_path / "ds")
    found = import_deepspeed_checkpoint(tmp_path / "ds", tmp_path / "out", optimizer="Adam")
    assert (found.step, found.stage, found.ranks, found.optimizer) == (7, stage, ranks, "Adam")
    assert inspect_checkpoint(tmp_path / "out").damage == ()
    values = stored(tmp_path / "out")
    assert values.keys() == {*forged.held, "buffer buffer"}
    for key, value in forged.held.items():
        assert torch.equal(values[key], value.flatten()), key
    _, manifest = open_checkpoint(tmp_path / "out")
    assert manifest.parameters["a.weight"].aliases == ["tied.weight"]
    assert manifest.parameters["a.weight"].dtype == "float16"
    assert not manifest.parameters["frozen"].trainable
    state = decode(manifest.scalar_state, "")
    assert state["loss_scaler"] == {"scale": 512.0, "hysteresis": 2, "clean_steps": 2}
    assert (state["steps"], state["skipped_steps"]) == (7, 2)
    assert state["param_groups"][1]["params"] == ["a.bias", "scale"]
    assert state["param_groups"][1]["settings"]["lr"] == 1.1
    assert "bias_correction" not in state["param_groups"][0]["settings"]
    assert set(state["optimizer"]["step"].values()) == {7}
    weights = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "ds", lazy_mode=True)
    for name in ("a.weight", "tied.weight", "frozen", "scale"):
        own = forged.held[f"master {name.replace('tied', 'a')}"]
        assert weights[name].shape == own.shape and torch.equal(weights[name].contiguous(), own)


def test_optimizers_of_deepspeed_and_of_torch(tmp_path: Path) -> None:
    def fused(rank: int, state: dict[str, Any]) -> None:
        for number, group in enumerate(state["base_optimizer_state"]["param_groups"]):
            del group["decoupled_weight_decay"], state["base_optimizer_state"]["state"][number]["step"]
            group["step"] = 9

    def configured(**settings: Any) -> Callable[[int, dict[str, Any]], None]:
        return lambda rank, state: state.update(
            ds_config={"optimizer": {"type": "Adam", "params": settings}}, loose=torch.ones(2)
        )

    for number, (settings, name) in enumerate([({}, "AdamW"), ({"adam_w_mode": False}, "Adam")]):
        out = tmp_path / f"out{number}"
        Forged(2, 2, edit_optimizer=fused, edit_model=configured(**settings)).write(tmp_path / f"ds{number}")
        assert import_deepspeed_checkpoint(tmp_path / f"ds{number}", out).optimizer == name
        _, manifest = open_checkpoint(out)
        assert set(manifest.scalar_state["optimizer"]["step"].values()) == {9}
        assert torch.equal(decode(manifest.client_state, "")["loose"], torch.ones(2))
    Forged(2, 2, edit_optimizer=fused).write(tmp_path / "unknown")
    with pytest.raises(CheckpointError, match=r"expected the class of its optimizer.*optimizer='AdamW'"):
        import_deepspeed_checkpoint(tmp_path / "unknown", tmp_path / "none")

    def momentum(rank: int, state: dict[str, Any]) -> None:
        for entry in state["optimizer_state_dict"]["state"].values():
            entry["momentum_buffer"] = entry.pop("exp_avg")
            del entry["exp_avg_sq"], entry["step"]

    forged = Forged(3, 2, edit_optimizer=momentum)
    forged.write(tmp_path / "sgd")
    import_deepspeed_checkpoint(tmp_path / "sgd", tmp_path / "out-sgd", optimizer="SGD")
    values = stored(tmp_path / "out-sgd")
    assert torch.equal(values["momentum_buffer a.bias"], forged.held["exp_avg a.bias"])
    _, manifest = open_checkpoint(tmp_path / "out-sgd")
    assert manifest.scalar_state["optimizer"]["scale"] == {"scalars": {}, "zero_dim": []}


def test_plain_bf16_runs_name_no_stage(tmp_path: Path) -> None:
    forged = Forged(1, 3, prefix="bf16_", edit_optimizer=lambda rank, state: state.pop("zero_stage"))
    forged.write(tmp_path / "ds")
    assert import_deepspeed_checkpoint(tmp_path / "ds" / "global_step7", tmp_path / "out").stage == 1
    assert torch.equal(stored(tmp_path / "out")["exp_avg a.bias"], forged.held["exp_avg a.bias"])


class Attack:
    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.reduced = (call, arguments)

    def __reduce__(self) -> Any:
        return self.reduced


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("location", ["optimizer", "model", "last model"])
def test_nothing_pickled_runs(tmp_path: Path, stage: int, location: str) -> None:
    mark = tmp_path / "ran"
    bombs = {
        "posix.system": Attack(os.system, f"touch {mark}"),
        "builtins.eval": Attack(eval, f"open({str(mark)!r}, 'w')"),
        "argparse.Namespace": argparse.Namespace(a=1),
    }

    def plant(rank: int, state: dict[str, Any], bomb: object) -> None:
        if location != "last model" or rank == 1 or stage == 1:
            state["client"] = [bomb]

    registered = set(torch.serialization.get_safe_globals())
    torch.serialization.add_safe_globals([argparse.Namespace])
    try:
        for number, (name, bomb) in enumerate(bombs.items()):
            kind = "edit_optimizer" if location == "optimizer" else "edit_model"
            edit = {kind: lambda rank, state, bomb=bomb: plant(rank, state, bomb)}
            tag = Forged(stage, 2, **edit).write(tmp_path / str(number))
            message = f"{re.escape(str(tag))}/.*_states.pt: refused: .* it calls '{re.escape(name)}'"
            for read in (
                lambda folder: import_deepspeed_checkpoint(folder, tmp_path / "out"),
                get_fp32_state_dict_from_zero_checkpoint,
                lambda folder: convert_zero_checkpoint_to_state_dict(folder, tmp_path / "out"),
            ):
                with pytest.raises(CheckpointError, match=message):
                    read(tmp_path / str(number))
        assert set(torch.serialization.get_safe_globals()) == {*registered, argparse.Namespace}
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(list(registered))
    assert not mark.exists() and not (tmp_path / "out").exists()


def set_in(*path: Any, to: Any) -> Callable[[int, dict[str, Any]], None]:
    def edit(rank: int, state: Any) -> None:
        for key in path[:-1]:
            state = state[key]
        state[path[-1]] = to

    return edit


def model(*path: Any, to: Any, rank: int | None = None) -> dict[str, Any]:
    """An edit of the models' files, or of that of one rank."""
    edit = set_in(*path, to=to)
    return {"edit_model": lambda own, state: edit(own, state) if rank in (None, own) else None}


def optim(*path: Any, to: Any, rank: int | None = None) -> dict[str, Any]:
    """An edit of the optimizers' files, or of that of one rank."""
    return {"edit_optimizer": model(*path, to=to, rank=rank)["edit_model"]}


MASTERS, STATE, FIRST = (
    "single_partition_of_fp32_groups",
    "optimizer_state_dict",
    ("param_shapes", 0, "a.weight"),
)
PADDINGS, BASE = "param_alignment_paddings", "base_optimizer_state"
FROZEN = ("frozen_param_fragments", "frozen")
ADDRESSES = [{"a.weight": fragment_address(35, 1)}, {"a.bias": fragment_address(4, 0)}]
UNCORRECTED = optim(STATE, "param_groups", 0, "bias_correction", to=False)
UNLIKE = {"edit_optimizer": lambda own, state: state[MASTERS].__setitem__(0, torch.ones(34 + 2 * own))}
NO_SCALE = {"edit_optimizer": lambda own, state: state["loss_scaler"].__dict__.update(cur_scale=0.0)}
# The stage, an edit, and words of the error.
BENT: dict[str, tuple[int, dict[str, Any], str]] = {
    "a shape too large": (2, model(*FIRST, to=torch.Size((7, 50))), "take .* hold"),
    "a shape too small": (3, model(*FIRST, to=(2,)), "take .* holds"),
    "a shape of huge": (2, model(*FIRST, to=(1 << 61, 8)), "take"),
    "a negative shape": (2, model(*FIRST, to=(-1, 5)), "param_shapes: 0: a.weight: .* from 0, got -1"),
    "groups missing": (2, {"edit_model": lambda own, state: state["param_shapes"].pop()}, "has 1 groups"),
    "a parameter twice": (
        2,
        model("param_shapes", 1, to={"a.weight": (7,), "scale": ()}),
        "'a.weight' twice",
    ),
    "masters of unlike sizes": (2, UNLIKE, r"the partitions have \[34, 36\] elements"),
    "a master too short": (
        2,
        optim(MASTERS, 0, to=torch.ones(33), rank=0),
        "69 elements, .* 2 ranks hold 66",
    ),
    "moments too short": (
        3,
        optim(STATE, "state", 0, "exp_avg", to=torch.ones(2), rank=1),
        r"36 floats .* shape \(2,\)",
    ),
    "masters of two dimensions": (2, optim(MASTERS, 0, to=torch.ones(4, 4)), "a one-dimensional tensor"),
    "another stage on one rank": (2, optim("zero_stage", to=1, rank=1), "stage: expected 2 .*got 1: .*mixed"),
    "stage 3 beside a whole model": (2, optim("zero_stage", to=3), "expected stage 1 or 2 .*got 3: files"),
    "a stage of its own": (2, optim("zero_stage", to=4), "zero_stage: .* got 4"),
    "steps that differ": (2, optim(BASE, "state", 0, "step", to=8, rank=1), "state besides tensors.*mixed"),
    "a group of other ranks": (2, optim("partition_count", to=[2, 1]), "as of experts"),
    "another number of ranks": (2, optim("partition_count", to=[4, 4]), "expected 4 "),
    "another number in the model": (2, model("dp_world_size", to=4), "expected 4 "),
    "tensor parallel": (2, model("mp_world_size", to=2), "tensor parallelism"),
    "experts": (3, model("num_experts", to=[4]), "expert parallelism"),
    "elastic": (1, optim(BASE, to=[{}]), "elastic_checkpoint"),
    "another step on one rank": (3, model("global_steps", to=6, rank=1), "expected step 7 .*got 6"),
    "a frozen part too short": (3, model(*FROZEN, to=torch.ones(2), rank=1), "has 2 elements"),
    "a fragment elsewhere": (
        2,
        optim("param_slice_mappings", to=ADDRESSES),
        "mappings: expected '.*' of group 0",
    ),
    "paddings of another kind": (2, optim(PADDINGS, to=[[0], 1]), f"{PADDINGS}: 1: expected a list, got 1"),
    "no moments": (3, optim(STATE, "state", to={}), "expected the state"),
    "no bias correction": (3, UNCORRECTED, "expected bias_correction, got False"),
    "a scaler that is none": (3, optim("loss_scaler", to=[1]), "loss_scaler: .* got a list"),
    "a scale of nothing": (3, NO_SCALE, "expected a scale above 0"),
    "a model file that is a list": (2, model("module", to=[1]), "module: expected a dict, got a list"),
    "a client's object": (2, model("mine", to={1, 2}), "client_state.mine: a builtins.set"),
}


@pytest.mark.parametrize("name", BENT)
def test_what_does_not_add_up_is_refused(tmp_path: Path, name: str) -> None:
    stage, edits, message = BENT[name]
    tag = Forged(stage, 2, **edits).write(tmp_path / "ds")
    with pytest.raises((CheckpointError, TypeError), match=message) as raised:
        import_deepspeed_checkpoint(tmp_path / "ds", tmp_path / "out")
    assert str(tag) in str(raised.value) or raised.type is TypeError
    assert not (tmp_path / "out").exists()


def move(name: str, to: str) -> Callable[[Path], object]:
    return lambda tag: (tag / name).rename(tag / to)


def copy(name: str, to: str) -> Callable[[Path], object]:
    return lambda tag: shutil.copy(tag / name, tag / to)


def cut(tag: Path) -> None:
    path = tag / OPTIM.format(1)
    os.truncate(path, path.stat().st_size * 2 // 3)


def flip(tag: Path) -> None:
    path = tag / OPTIM.format(1)
    with zipfile.ZipFile(path) as archive:
        record = max(archive.infolist(), key=lambda record: record.file_size)
    content = bytearray(path.read_bytes())
    content[record.header_offset + 30 + len(record.filename) + 200] ^= 1
    path.write_bytes(content)


def latest(text: str) -> Callable[[Path], object]:
    return lambda tag: (tag.parent / "latest").write_text(text)


FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a rank missing": (move(OPTIM.format(0), "x"), "got none of rank 0"),
    "the last rank missing": (move(OPTIM.format(1), "x"), "expected 2 .*got 1"),
    "a rank too many": (copy(OPTIM.format(1), OPTIM.format(2)), "expected 2 .*got 3"),
    "a rank twice": (copy(OPTIM.format(1), "bf16_" + OPTIM.format(1)), "both of rank 1"),
    "no model": (move(MODEL, "x"), "got 0 "),
    "a model of stage 3 beside it": (copy(MODEL, "zero_pp_rank_0_" + MODEL), "model files of one kind"),
    "a tensor-parallel rank": (copy(MODEL, "mp_rank_01_model_states.pt"), "tensor-parallel"),
    "a tensor-parallel optimizer": (
        copy(MODEL, OPTIM.format(0).replace("00_optim", "01_optim")),
        "tensor-parallel",
    ),
    "experts": (copy(MODEL, "expert_0_mp_rank_00_model_states.pt"), "mixture-of-experts"),
    "pipeline": (copy(MODEL, "layer_00-model_states.pt"), "pipeline"),
    "a truncated file": (cut, "damaged"),
    "a flipped bit": (flip, "damaged"),
    "an empty file": (lambda tag: (tag / MODEL).write_bytes(b""), "damaged"),
    "a plain pickle": (lambda tag: (tag / MODEL).write_bytes(pickle.dumps({})), "damaged"),
    "no latest": (lambda tag: (tag.parent / "latest").unlink(), "cannot be read.*as global_step7"),
    "latest of another": (latest("global_step8"), "name of a folder .*, got 'global_step8'. .* global_step7"),
    "latest above": (latest("../ds/global_step7"), "expected the name of a folder"),
    "latest absolute": (latest("/etc"), "expected the name of a folder"),
    "latest of dots": (latest(".."), "expected the name of a folder"),
    "latest empty": (latest(""), "expected the name of a folder"),
    "latest long": (latest("x" * 5000), "expected the name of a folder"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_an_incomplete_folder_is_refused(tmp_path: Path, name: str) -> None:
    change, message = FOLDERS[name]
    change(Forged(2, 2).write(tmp_path / "ds"))
    with pytest.raises(CheckpointError, match=message):
        import_deepspeed_checkpoint(tmp_path / "ds", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_pipe_does_not_keep_the_reader_waiting(tmp_path: Path) -> None:
    tag = Forged(2, 2).write(tmp_path / "ds")
    (tag / MODEL).unlink()
    os.mkfifo(tag / MODEL)
    with pytest.raises(CheckpointError, match="not a regular file"):
        import_deepspeed_checkpoint(tmp_path / "ds", tmp_path / "out")


@pytest.mark.parametrize("claimed", [b"K\xff", b"M\xff\xff"])
def test_a_tensor_beyond_its_record_is_refused(tmp_path: Path, claimed: bytes) -> None:
    """Whatever torch thinks of it: no byte outside the file is read."""
    tag = Forged(2, 1).write(tmp_path / "ds")
    path = tag / OPTIM.format(0)
    with zipfile.ZipFile(path) as archive:
        records = {record.filename: archive.read(record) for record in archive.infolist()}
    table = next(name for name in records if name.endswith("data.pkl"))
    numel = 35 + 33 + 1 + 1  # the first master with its alignment, as pickle writes small numbers
    forged = records[table].replace(b"K" + bytes([numel]), claimed)
    assert forged != records[table]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in records.items():
            archive.writestr(name, forged if name == table else content)
    with pytest.raises(CheckpointError, match=re.escape(str(path))):
        import_deepspeed_checkpoint(tmp_path / "ds", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_error_while_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from zero_ext.checkpoint.files import Filesystem

    Forged(3, 2).write(tmp_path / "ds")
    import_deepspeed_checkpoint(tmp_path / "ds", tmp_path / "out")
    before = stored(tmp_path / "out")
    writes = itertools.count()
    original = Filesystem.write

    def fail(self: Filesystem, descriptor: int, data: memoryview, path: Path) -> None:
        if next(writes) == 1:
            raise OSError(28, "No space left on device", str(path))
        original(self, descriptor, data, path)

    monkeypatch.setattr(Filesystem, "write", fail)
    with pytest.raises(OSError, match="No space left"):
        import_deepspeed_checkpoint(tmp_path / "ds", tmp_path / "out")
    monkeypatch.undo()
    assert stored(tmp_path / "out").keys() == before.keys()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [".lock", "latest", "step-000007"]


def test_memory_stays_small(tmp_path: Path) -> None:
    """Private memory, sampled while 140 MB go through: imported, and converted from both formats."""

    def private() -> int:
        fields = Path("/proc/self/status").read_text()
        return int(re.findall(r"RssAnon:\s+(\d+) kB", fields)[0]) << 10

    forged = Forged(2, 2, groups=[{"large": (1500, 2000), "larger": (3000, 3000)}])
    forged.write(tmp_path / "ds")
    forged.held.clear()
    base, highest, done = private(), 0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not done.is_set():
            highest = max(highest, private())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        found = import_deepspeed_checkpoint(tmp_path / "ds", tmp_path / "imported")
        for source, safe in itertools.product(("ds", "imported"), (False, True)):
            convert_zero_checkpoint_to_state_dict(
                tmp_path / source, tmp_path / f"{source} {safe}", safe_serialization=safe
            )
    finally:
        done.set()
        watcher.join()
    assert found.bytes_written > 140_000_000
    assert highest - base < 45 << 20, f"{(highest - base) >> 20} MiB"
    shutil.rmtree(tmp_path)


def test_a_model_that_the_weights_do_not_fit(tmp_path: Path) -> None:
    Forged(2, 2).write(tmp_path / "ds")
    model = torch.nn.Linear(3, 3)
    before = model.weight.clone()
    with pytest.raises(ValueError, match=r"does not fit this model.*'a.bias' is not in the model"):
        load_state_dict_from_zero_checkpoint(model, tmp_path / "ds")
    assert torch.equal(model.weight, before)
    for wrong in ({"dtype": "int8"}, {"max_shard_size": "many"}, {"max_shard_size": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            convert_zero_checkpoint_to_state_dict(tmp_path / "ds", tmp_path / "out", **wrong)
    assert not (tmp_path / "out").exists()


def test_long_names_are_not_repeated_in_errors(tmp_path: Path) -> None:
    long = "x" * 100_000
    Forged(2, 2, groups=[{long: (3,)}, {f"{long}y": (2,)}]).write(tmp_path / "ds")
    with pytest.raises(ValueError, match="does not fit this model") as caught:
        load_state_dict_from_zero_checkpoint(torch.nn.Linear(3, 3), tmp_path / "ds")
    assert len(str(caught.value)) < 2000
