"""Checkpoints and weights of models on an accelerator: the CPU's files bit for bit, and into each other."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

import zero_ext
from tests.checkpoint.test_engine_checkpoint import Mixture, check_same
from tests.multi.on_ranks import on_ranks
from tests.multi.pool import RankPool
from tests.multi.rank import World
from zero_ext.checkpoint import state_slices
from zero_ext.checkpoint.format.manifest import CHUNK_BYTES
from zero_ext.checkpoint.weights.hf_export import export_huggingface
from zero_ext.zero import engine_of

MODULE = "tests.checkpoint.test_device_checkpoint"
DEVICE = "stand_in:0"


class Large(Mixture):
    """Has a parameter of several staging chunks as well, and no convolution, which the device lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Linear(900, 1000)

    def forward(self, ids: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        seen = images.mean(1, keepdim=True) * self.conv.weight.mean() + self.conv.bias.view(1, -1, 1, 1)
        seen = self.frozen(self.drop(self.norm(seen)).mean((2, 3)))
        loss = self.drop(self.language(ids)).float().square().mean() + seen.float().square().mean()
        return loss + self.wide.bias.square().mean()


class Training:
    """A prepared model on ``device``, built from ``seed``."""

    def __init__(
        self,
        world: World,
        device: str,
        stage: int,
        seed: int,
        folder: str,
        tiers: dict[str, str],
        moments: str = "fp32",
    ) -> None:
        torch.manual_seed(seed)
        if device == DEVICE:
            torch.stand_in.set_schedule("lazy")  # type: ignore[attr-defined]
        model = Large()
        config = {
            "stage": stage,
            "timeout_seconds": 120.0,
            "precision": {"dtype": "bf16", "moments_dtype": moments},
            "offload": {**tiers, "nvme_paths": [folder]} if "nvme" in tiers.values() else tiers,
        }
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        self.world = world
        self.device = device
        self.model, self.optimizer = zero_ext.prepare(
            model, optimizer, config, process_group=world.group, device=device
        )

    def step(self) -> None:
        ids = torch.randint(0, 23, (2, 5)).to(self.device)
        images = torch.randn(2, 3, 4, 4).to(self.device)
        self.model(ids, images).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@on_ranks(1, stand_in=True)
def test_staging_is_ordered_in_both_directions(world: World) -> None:
    torch.stand_in.set_schedule("lazy")  # type: ignore[attr-defined]
    staging = state_slices.DeviceStaging()
    values = torch.randn(3 * CHUNK_BYTES)  # 12 MiB: three chunks in two buffers
    into = torch.full_like(values, float("nan"), device=DEVICE)
    staging.write(into, values)
    doubled = into * 2
    found = torch.cat([chunk.clone() for chunk in staging.read(doubled)]).view(torch.float32)
    assert torch.equal(found, values * 2)


def train_and_save(world: World, directory: str, **setting: Any) -> None:
    training = Training(world, **setting)
    for _ in range(2):
        training.step()
    zero_ext.save_checkpoint(directory, training.model)


def load_and_save(
    world: World, source: str, directory: str, background: bool, **setting: Any
) -> dict[str, torch.Tensor]:
    """Saves again what was loaded; the state after it, whole."""
    with mock.patch.object(state_slices, "STAGING_BYTES", CHUNK_BYTES):
        training = Training(world, **setting)
        training.step()  # its own state, which must go
        zero_ext.load_checkpoint(source, training.model)
        torch.manual_seed(0)
        state = zero_ext.full_state_dict(training.model)
        handle = zero_ext.save_checkpoint(directory, training.model, async_save=background)
        training.step()  # while a background save may still be writing
        handle.wait()
    return state


def files_of(directory: Path) -> dict[str, bytes]:
    (step,) = directory.glob("step-*")
    return {path.name: path.read_bytes() for path in step.iterdir() if path.name != "manifest.json"}


def manifest_of(directory: Path) -> dict[str, Any]:
    """What a manifest says, but for its own checksum."""
    (path,) = directory.glob("step-*/manifest.json")
    manifest: dict[str, Any] = json.loads(path.read_text())
    del manifest["manifest_crc32c"]
    return manifest


TIERS = [
    (1, 3, {}, False),
    (2, 0, {}, True),
    (3, 3, {"optimizer": "host", "grads": "host", "params": "host"}, True),
    (2, 3, {"optimizer": "nvme", "params": "nvme"}, False),
]
TIERS = [(*case, "fp32") for case in TIERS] + [(2, 1, {}, False, "8bit")]


@pytest.mark.by_turns()
@pytest.mark.parametrize(("ranks", "stage", "tiers", "background", "moments"), TIERS)
def test_a_device_saves_what_a_cpu_saves(
    stand_in_pool: RankPool,
    tmp_path: Path,
    ranks: int,
    stage: int,
    tiers: dict[str, str],
    background: bool,
    moments: str,
) -> None:
    common = {"seed": secrets.randbits(20), "folder": str(tmp_path)}
    print(common["seed"])
    local = tmp_path / "here"
    stand_in_pool.run(
        2,
        f"{MODULE}:train_and_save",
        {**common, "directory": str(local), "device": DEVICE, "stage": 2, "tiers": {}},
    )
    states = {}
    for device in (DEVICE, "cpu"):
        setting = {"device": device, "stage": stage, "tiers": tiers, "moments": moments}
        setting["background"] = background
        target = {"source": str(local), "directory": str(tmp_path / device)}
        states[device] = stand_in_pool.run(ranks, f"{MODULE}:load_and_save", {**common, **setting, **target})[
            0
        ]
    check_same(states[DEVICE], states["cpu"])
    assert {value.device.type for value in states[DEVICE].values()} == {"cpu"}
    ours, theirs = files_of(tmp_path / DEVICE), files_of(tmp_path / "cpu")
    assert ours.keys() == theirs.keys() and len(ours) >= ranks
    assert all(ours[name] == theirs[name] for name in ours)
    manifest, wanted = manifest_of(tmp_path / DEVICE), manifest_of(tmp_path / "cpu")
    assert list(manifest["extra"].pop("device_random")) == ["stand_in"]
    assert manifest == wanted


def draws(world: World, directory: str, load: bool) -> list[float]:
    training = Training(world, DEVICE, 3, 1, directory, {})
    if load:
        zero_ext.load_checkpoint(directory, training.model)
    else:
        training.step()
        zero_ext.save_checkpoint(directory, training.model)
    return torch.rand(4, device=DEVICE).tolist()


def test_random_numbers_of_the_device_go_on(stand_in_pool: RankPool, tmp_path: Path) -> None:
    arguments = {"directory": str(tmp_path)}
    before = stand_in_pool.run(2, f"{MODULE}:draws", {**arguments, "load": False})
    assert stand_in_pool.run(2, f"{MODULE}:draws", {**arguments, "load": True}) == before


def load_weights(world: World, path: str, folder: str, tiers: dict[str, str]) -> None:
    with torch.device("meta"):
        model = Large()
    model.scratch = torch.randn(4)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    offload = {**tiers, "nvme_paths": [folder]} if "nvme" in tiers.values() else tiers
    config = {"stage": 3, "timeout_seconds": 120.0, "offload": offload}
    model, _ = zero_ext.prepare(model, optimizer, config, process_group=world.group, init="skip")
    assert engine_of(model).device == torch.device(DEVICE)
    zero_ext.load_weights(model, path)
    assert {each.device for each in (*model.parameters(), *model.buffers())} == {torch.device(DEVICE)}
    for round_trip in (False, True):
        state = zero_ext.full_state_dict(model)
        for name, value in torch.load(path + ".reference").items():
            assert torch.equal(state[name], value), name
        if not round_trip:  # from the device's memory as well
            zero_ext.load_full_state_dict(model, {name: value.to(DEVICE) for name, value in state.items()})


@pytest.mark.parametrize("tiers", [{}, {"optimizer": "nvme", "params": "host"}], ids=["device", "tiers"])
def test_weights_reach_a_model_that_was_never_anywhere(
    stand_in_pool: RankPool, tmp_path: Path, tiers: dict[str, str]
) -> None:
    torch.manual_seed(secrets.randbits(20))
    state = {name: value.contiguous().clone() for name, value in Large().state_dict().items()}
    path = str(tmp_path / "model.safetensors")
    save_file(state, path)
    torch.save(state, path + ".reference")
    stand_in_pool.run(2, f"{MODULE}:load_weights", {"path": path, "folder": str(tmp_path), "tiers": tiers})


def test_export_needs_no_device(stand_in_pool: RankPool, tmp_path: Path) -> None:
    arguments = {"seed": 3, "folder": str(tmp_path), "device": DEVICE, "stage": 3, "tiers": {}}
    stand_in_pool.run(2, f"{MODULE}:train_and_save", {**arguments, "directory": str(tmp_path / "saved")})
    (file,) = export_huggingface(tmp_path / "saved", tmp_path / "out")
    assert file.stat().st_size > 900 * 1000 * 2
