"""Checkpoints that an installed DeepSpeed wrote on two ranks: state bit for bit, and on from there."""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import zero_ext
from tests.cli.command import run
from tests.integrations.deepspeed_checkpoint.subject import (
    CASES,
    CLIPPING,
    RESUMED_FOR,
    SAVED_AFTER,
    WARMUP,
    Subject,
    batch_of,
    config_of,
    subject_of,
)
from tests.integrations.launch import started
from tests.multi.pool import RankPool
from tests.multi.rank import World
from zero_ext.checkpoint import CheckpointError, inspect_checkpoint
from zero_ext.integrations.deepspeed.checkpoint_io.checkpoint_import import import_deepspeed_checkpoint
from zero_ext.integrations.deepspeed.checkpoint_io.checkpoint_weights import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from zero_ext.integrations.load_weights import open_weights
from zero_ext.optim.schedulers import WarmupLR
from zero_ext.zero import engine_of
from zero_ext.zero.api.engine_lookup import checkpoint_sources

MODULE = "tests.integrations.deepspeed_checkpoint.test_real"
# Ranks and stage that go on from each case, others than those that saved it.
GOES_ON = {"stage1-fp32": (3, 3), "stage2-bf16": (1, 0), "stage3-fp32": (2, 1), "stage3-bf16": (3, 2)}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepspeed")
    started([sys.executable, "-m", "tests.integrations.deepspeed_checkpoint.write_with_deepspeed", folder])
    return folder


def held_by(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "held.pt")


def resume_on_rank(world: World, folder: str, stage: int, dtype: str) -> dict[str, Any]:
    model, optimizer = subject_of(seed=3)
    config = {
        "stage": stage,
        "gradient_clipping": CLIPPING,
        "precision": {"dtype": dtype},
        "timeout_seconds": 60,
        "units": {"bucket_elements": 200},
    }
    model, optimizer = zero_ext.prepare(model, optimizer, config, process_group=world.group)
    scheduler = WarmupLR(optimizer, **WARMUP)
    loaded = zero_ext.load_checkpoint(folder, model, scheduler=scheduler)
    state = checkpoint_sources(engine_of(model)).own
    mine = [(p.kind, p.name, p.start, p.tensor.float().tolist()) for p in state.save_slices()]
    scalars = state.scalar_state()
    buffers = {f"buffer {name}": value.clone() for name, value in state.buffers().items()}
    rates, losses = [group["lr"] for group in optimizer.param_groups], []
    for step in range(SAVED_AFTER, SAVED_AFTER + RESUMED_FOR):
        loss = model(batch_of(step, world.rank, world.size))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    slices = list(itertools.chain(*world.everyone(mine)))
    means = [sum(each) / world.size for each in zip(*world.everyone(losses), strict=True)]
    return {
        "slices": slices,
        "buffers": buffers,
        "scalars": scalars,
        "rates": rates,
        "losses": means,
        "loaded": (loaded.step, loaded.client_state),
    }


@pytest.mark.parametrize("name", CASES)
def test_training_goes_on(name: str, written: Path, tmp_path: Path, rank_pool: RankPool) -> None:
    folder, (ranks, stage), dtype = written / name, GOES_ON[name], CASES[name]["dtype"]
    found = import_deepspeed_checkpoint(folder, tmp_path)
    assert (found.step, found.stage, found.ranks, found.optimizer) == (3, CASES[name]["stage"], 2, "AdamW")
    assert inspect_checkpoint(tmp_path).damage == ()
    arguments = {"folder": str(tmp_path), "stage": stage, "dtype": dtype}
    result = rank_pool.run(ranks, f"{MODULE}:resume_on_rank", arguments)[0]
    assert result["loaded"] == (3, {"mine": [1, (2, "three")]})
    slices_by_key: dict[str, list[tuple[int, list[float]]]] = {}
    for kind, parameter, start, values in result["slices"]:
        slices_by_key.setdefault(f"{kind} {parameter}", []).append((start, values))
    held = held_by(folder)
    buffers = {key: held.pop(key) for key in [key for key in held if key.startswith("buffer ")]}
    assert slices_by_key.keys() == held.keys()
    for key, value in held.items():
        values = torch.tensor(list(itertools.chain(*(chunk for _, chunk in sorted(slices_by_key[key])))))
        assert torch.equal(values, value.float().flatten()), key
    for key, value in buffers.items():
        assert torch.equal(result["buffers"][key].float(), value.float()), key
    assert result["scalars"]["steps"] == SAVED_AFTER
    assert set(result["scalars"]["optimizer"]["step"].values()) == {SAVED_AFTER}
    seen = json.loads((folder / "seen.json").read_text())
    assert result["rates"] == seen["rates"]
    tolerance = 1e-5 if dtype == "fp32" else 2e-2
    assert result["losses"] == pytest.approx(seen["losses"], rel=tolerance)


def load_weights_on_rank(world: World, folder: str, stage: int, dtype: str) -> dict[str, Any]:
    model, optimizer = subject_of(seed=3)
    config = {"stage": stage, "precision": {"dtype": dtype}, "units": {"bucket_elements": 200}}
    model, optimizer = zero_ext.prepare(model, optimizer, config, process_group=world.group)
    missing_and_unexpected = zero_ext.load_weights(model, folder)
    state = checkpoint_sources(engine_of(model)).own
    mine = [(p.name, p.start, p.tensor.float().tolist()) for p in state.save_slices() if p.kind == "master"]
    return {
        "slices": list(itertools.chain(*world.everyone(mine))),
        "buffers": {name: value.clone() for name, value in state.buffers().items()},
        "found": missing_and_unexpected,
        "steps": engine_of(model).steps,
    }


# Cases whose weights are also read from what DeepSpeed's converter made of them, in a folder of this name.
CONVERTED = [
    ("stage1-fp32", "universal"),
    ("stage1-fp32", "universal of tensor parallel ranks"),
    ("stage3-fp32", "universal"),
    ("stage3-bf16", "universal"),
]


@pytest.mark.parametrize(("name", "converted"), [*((name, "") for name in CASES), *CONVERTED])
def test_weights_alone(name: str, converted: str, written: Path, rank_pool: RankPool) -> None:
    folder, (ranks, stage), dtype = written / name, GOES_ON[name], CASES[name]["dtype"]
    arguments = {"folder": str(folder / converted), "stage": stage, "dtype": dtype}
    result = rank_pool.run(ranks, f"{MODULE}:load_weights_on_rank", arguments)[0]
    assert result["found"] == ([], []) and result["steps"] == 0
    values: dict[str, list[tuple[int, list[float]]]] = {}
    for parameter, start, numbers in result["slices"]:
        values.setdefault(parameter, []).append((start, numbers))
    held = held_by(folder)
    masters = {key.removeprefix("master "): value for key, value in held.items() if key.startswith("master ")}
    assert values.keys() == masters.keys()
    for key, value in masters.items():
        found = torch.tensor(list(itertools.chain(*(numbers for _, numbers in sorted(values[key])))))
        assert torch.equal(found, value.float().flatten()), key
    for key, value in result["buffers"].items():
        assert torch.equal(value.float(), held[f"buffer {key}"].float()), key


def test_converters_of_round_robin_gradients_mix_parameters_up(written: Path) -> None:
    folder = written / "stage2-bf16"
    path = folder / "universal" / f"global_step{SAVED_AFTER}" / "zero" / "out.weight" / "fp32.pt"
    assert not torch.equal(torch.load(path)["param"], held_by(folder)["master out.weight"])
    with pytest.raises(CheckpointError, match="expected a run without round_robin_gradients"):
        open_weights(folder / "universal", None)


def read_back(paths: list[Path]) -> dict[str, torch.Tensor]:
    """The tensors of several files, as their index says."""
    *files, index = paths
    assert len(files) > 1
    stored: dict[str, torch.Tensor] = {}
    for path in files:
        own = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
        for key in own:
            assert json.loads(index.read_text())["weight_map"][key] == path.name
        stored |= own
    return stored


@pytest.mark.parametrize("name", CASES)
def test_fp32_weights(name: str, written: Path, tmp_path: Path) -> None:
    folder = written / name
    held, reference = held_by(folder), torch.load(folder / "fp32.pt")
    found = get_fp32_state_dict_from_zero_checkpoint(folder)
    assert found.keys() == Subject().state_dict().keys()
    assert found["head.weight"] is found["embedding.weight"]
    for key, value in reference.items():
        assert torch.equal(found[key].float(), value.float()), key
    model = load_state_dict_from_zero_checkpoint(Subject(), folder)
    stored, pickled = [
        read_back(convert_zero_checkpoint_to_fp32_state_dict(folder, tmp_path / "out", "1KB", safe))
        for safe in (True, False)
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert pickled["head.weight"] is pickled["embedding.weight"] and "head.weight" not in stored
    # Of what DeepSpeed's own script wrote.
    for key, value in torch.load(folder / "converted" / "pytorch_model.bin").items():
        assert torch.equal(pickled[key].float(), value.float()), key
    for key, value in held.items():
        kind, parameter = key.split()
        if kind in ("master", "buffer"):
            for state in (found, model.state_dict(), stored, pickled):
                assert torch.equal(state[parameter].float(), value.float()), key


NVME = {"device": "nvme", "nvme_path": "<folder>"}
# Stage, precision and tiers of a training here, and how its weights are asked for.
OWN: dict[str, tuple[int, str, dict[str, Any], list[str]]] = {
    "stage2-host": (
        2,
        "fp32",
        {"offload_optimizer": {"device": "cpu"}},
        ["zero_to_fp32.py", "--exclude_frozen_parameters"],
    ),
    "stage3-nvme": (
        3,
        "bf16",
        {"offload_optimizer": NVME, "offload_param": NVME},
        ["zero_to_torch.py", "--dtype", "fp32", "--safe_serialization", "-t", "global_step3"],
    ),
}


def save_on_rank(world: World, folder: str, stage: int, dtype: str, zero: str) -> dict[str, torch.Tensor]:
    """The float32 values of all parameters and buffers, and a checkpoint."""
    from zero_ext.integrations import deepspeed

    model, optimizer = subject_of(seed=1)
    config = config_of(world.size, stage, dtype, json.loads(zero))
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    for step in range(SAVED_AFTER):
        engine.backward(engine(batch_of(step, world.rank, world.size)))
        engine.step()
    engine.save_checkpoint(folder)
    held = engine.module_state_dict()
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            held[name] = deepspeed.utils.safe_get_full_fp32_param(parameter).clone()
    return held


@pytest.mark.parametrize("name", OWN)
def test_the_script_beside_an_own_checkpoint(
    name: str, written: Path, tmp_path: Path, rank_pool: RankPool
) -> None:
    stage, dtype, zero, (script, *options) = OWN[name]
    folder = tmp_path / "run"
    values = json.dumps(zero).replace("<folder>", str(tmp_path))
    arguments = {"folder": str(folder), "stage": stage, "dtype": dtype, "zero": values}
    held = rank_pool.run(4, f"{MODULE}:save_on_rank", arguments)[0]
    assert {path.name for path in folder.iterdir()} == {
        "global_step3",
        "latest",
        "zero_to_fp32.py",
        "zero_to_torch.py",
    }
    assert inspect_checkpoint(folder / "global_step3").damage == ()
    assert os.access(folder / script, os.X_OK)
    done = started([sys.executable, script, ".", "out", *options], cwd=folder)
    (path,) = (folder / "out").iterdir()
    assert done.stdout == f"{path}\n"
    found = load_file(path) if "--safe_serialization" in options else torch.load(path, weights_only=True)
    left_out = {"head.weight"} if path.suffix == ".safetensors" else {"frozen.weight", "frozen.bias"}
    assert found.keys() == held.keys() - left_out
    for key in found:
        # Floating-point buffers are saved in the precision that the model computes in.
        assert torch.equal(found[key], held[key].to(found[key].dtype)), key
        assert found[key].dtype == (torch.int64 if key == "calls" else torch.float32)
    if dtype == "fp32":
        # The same training; at stage 1 DeepSpeed leaves frozen parameters out.
        theirs = torch.load(written / "stage1-fp32" / "converted" / "pytorch_model.bin")
        assert found.keys() == theirs.keys()
        for key in found:
            torch.testing.assert_close(found[key], theirs[key], rtol=1e-4, atol=1e-6, msg=key)


def test_command(written: Path, tmp_path: Path) -> None:
    output = run("import-deepspeed", str(written / "stage3-fp32"), str(tmp_path / "out"))
    assert "DeepSpeed ZeRO stage 3 on 2 ranks" in output and "AdamW" in output
    assert (tmp_path / "out" / "latest").read_text() == "step-000003\n"
    refused = run("import-deepspeed", str(tmp_path / "none"), str(tmp_path / "other"), status=1)
    assert "no such folder" in refused and not (tmp_path / "other").exists()
