"""Checkpoints of this engine under DeepSpeed's names: pipelines, damage, what libraries read, and
whole weights in one file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.fake_source import SMALL, FakeSource
from tests.integrations.deepspeed.pipeline_model import engine_of, full_values, micro_batches
from tests.integrations.launch import RUN, found_in, started
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.checkpoint import CheckpointError, save_state
from zero_ext.integrations.deepspeed.checkpoint_io import checkpoint_tags
from zero_ext.integrations.deepspeed.checkpoint_io.checkpoint_weights import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    get_model_state_file,
    get_optim_files,
    main,
)


@on_ranks(4)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_pipeline(world: World, stage: int) -> None:
    engine = engine_of(stage)
    engine.train_batch(micro_batches(engine, world.seed))
    folder = world.shared_folder()
    engine.save_checkpoint(folder)
    found = get_fp32_state_dict_from_zero_checkpoint(folder, lazy_mode=True)
    wanted = full_values(world, engine)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].shape == value.shape and torch.equal(found[name].contiguous(), value), name


def saved(folder: Path) -> dict[str, torch.Tensor]:
    """A checkpoint of a few parameters as ``folder/mine``; their values."""
    source = FakeSource(SMALL, 1)
    save_state(folder / "mine", source, client_state={"client": {"epoch": 3}})
    (folder / "latest").write_text("mine")
    return {name: source.held["master", name] for name in SMALL}


def test_every_folder_that_names_one(tmp_path: Path) -> None:
    held = saved(tmp_path)
    step = tmp_path / "mine" / "step-000001"
    for arguments in ((tmp_path,), (tmp_path, "mine"), (tmp_path / "mine",), (step,)):
        found = get_fp32_state_dict_from_zero_checkpoint(*arguments)
        for name, values in held.items():
            assert torch.equal(found[name].flatten(), values), (arguments, name)
    assert torch.load(get_optim_files(tmp_path / "mine")[0])["optimizer_state_dict"]["partition_count"] == 1
    assert torch.load(get_model_state_file(tmp_path / "mine", 0))["epoch"] == 3


def flip(step: Path) -> None:
    path = step / "rank-00000.safetensors"
    record = next(
        record
        for record in json.loads((step / "manifest.json").read_text())["slices"]
        if record["kind"] == "master"
    )
    data = bytearray(path.read_bytes())
    data[record["offset"]] ^= 1
    path.write_bytes(data)


def cut(step: Path) -> None:
    os.truncate(step / "manifest.json", 100)


@pytest.mark.parametrize("change", [flip, cut], ids=["a flipped bit", "a truncated manifest"])
def test_damage_is_refused(
    tmp_path: Path, change: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path)
    change(tmp_path / "mine" / "step-000001")
    with pytest.raises(CheckpointError, match="step-000001"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    for safe in (False, True):
        with pytest.raises(CheckpointError, match="step-000001"):
            convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "out", safe_serialization=safe)
    assert not list((tmp_path / "out").glob("*"))
    with pytest.raises(SystemExit, match="step-000001"):
        main([str(tmp_path), str(tmp_path / "out")])
    with pytest.raises(CheckpointError, match="step-000001"):
        main([str(tmp_path), str(tmp_path / "out"), "--debug"])


def test_what_a_killed_save_left_is_replaced(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("precious")
    (tmp_path / ".latest").write_text("half")
    (tmp_path / ".zero_to_fp32.py").symlink_to(outside)
    checkpoint_tags._write_beside(tmp_path, {"zero_to_fp32.py": "#!new", "latest": "mine"})
    assert outside.read_text() == "precious"
    assert {path.name for path in tmp_path.iterdir()} == {"outside", "latest", "zero_to_fp32.py"}
    assert (tmp_path / "latest").read_text() == "mine" and os.access(tmp_path / "zero_to_fp32.py", os.X_OK)


def test_libraries_read_them(tmp_path: Path) -> None:
    config = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 3}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    script = Path(__file__).parent / "scripts" / "libraries.py"
    environment = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": tmp_path / "config.json",
        "ACCELERATE_MIXED_PRECISION": "no",
    }
    started([*RUN, "--deepspeed-compat", script, tmp_path], **environment)
    found = found_in(tmp_path)
    trainer = found.pop("trainer")
    assert trainer.pop("best") == "checkpoint-2"
    assert trainer == dict.fromkeys(trainer, True)
    assert found == {"accelerate": True, "lightning": {"epoch": 2, "steps": False, "values": True}}


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_a_link_at_the_partial_name_is_not_followed(tmp_path: Path, name: str) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "out"
    outside.write_text("precious")
    folder.mkdir()
    (folder / f".partial-{name}").symlink_to(outside)
    checkpoint_tags._write({"a": torch.arange(3)}, folder / name)
    assert outside.read_text() == "precious"
    read = load_file if name.endswith("safetensors") else torch.load
    assert torch.equal(read(folder / name)["a"], torch.arange(3))
    assert [path.name for path in folder.iterdir()] == [name]
