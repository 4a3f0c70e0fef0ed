"""Weights of checkpoints into prepared models: the bits that were saved, or an error and nothing changed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import zero_ext
from tests.checkpoint.test_engine_checkpoint import Mixture, batch_of
from tests.checkpoint.weights.test_fill_weights import masters, prepared, write_weights
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from zero_ext.checkpoint import CheckpointError
from zero_ext.integrations.load_weights import open_weights
from zero_ext.zero import engine_of
from zero_ext.zero.api.full_parameters import full_state

# Stage and tiers that save, and those that load.
PAIRS: list[tuple[int, dict[str, Any], int, dict[str, Any]]] = [
    (3, {}, 0, {}),
    (0, {}, 3, {"params": "nvme", "optimizer": "nvme"}),
    (2, {"optimizer": "nvme"}, 3, {"params": "host", "optimizer": "host"}),
    (3, {"params": "nvme"}, 1, {"optimizer": "host"}),
]


@contextmanager
def folders(world: World) -> Iterator[tuple[Path, str]]:
    """A folder of all ranks, and one of this rank's own for its storage."""
    with tempfile.TemporaryDirectory() as shared, tempfile.TemporaryDirectory() as own:
        yield Path(world.everyone(shared)[0]), own
        world.barrier()


def trained(world: World, storage: str, seed: int, stage: int = 3, **more: Any) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model, optimizer = prepared(world, Mixture(), storage, stage, **more)
    model(*batch_of(world, seed, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def saved_by(world: World, model: Any) -> dict[str, torch.Tensor]:
    """What a checkpoint holds: of buffers that differ between the ranks those of rank 0."""
    found: dict[str, torch.Tensor] = world.everyone(zero_ext.full_state_dict(model))[0]
    return found


def moments(optimizer: Any) -> list[torch.Tensor]:
    engine = optimizer.engine
    return [
        value
        for parameter in engine.index
        if parameter.requires_grad and (value := full_state(parameter, "exp_avg")) is not None
    ]


@on_ranks(1, 2, 3, by_turns=True)
@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_weights_are_those_saved_and_the_optimizer_stays(world: World, number: int) -> None:
    stage, offload, other_stage, other_offload = PAIRS[number]
    with folders(world) as (folder, storage):
        source, _ = trained(world, storage, world.seed, stage, offload=offload)
        zero_ext.save_checkpoint(folder, source, step=7).wait()
        saved = saved_by(world, source)
        for path in (folder, folder / "step-000007"):
            model, optimizer = trained(world, storage, world.seed + 1, other_stage, offload=other_offload)
            before = moments(optimizer)
            assert zero_ext.load_weights(model, path) == ([], [])
            found = zero_ext.full_state_dict(model)
            assert found.keys() == saved.keys()
            for name, value in saved.items():
                assert torch.equal(found[name], value), name
            after = moments(optimizer)
            assert len(before) == len(after) > 5 and all(map(torch.equal, before, after))
            assert engine_of(model).steps == 1
            model(*batch_of(world, world.seed, 1)).backward()
            optimizer.step()


@on_ranks(1, 2)
def test_masters_keep_the_precision_of_the_file(world: World) -> None:
    config = {"precision": {"dtype": "bf16"}}
    with folders(world) as (folder, storage):
        source, _ = trained(world, storage, world.seed, 3, config=config)
        zero_ext.save_checkpoint(folder, source).wait()
        model, _ = trained(world, storage, world.seed + 1, 3, config=config)
        zero_ext.load_weights(model, folder)
        assert masters(model) == masters(source)


class Channels(nn.Module):
    """A convolution in one memory format or the other."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        if last:
            self.conv.to(memory_format=torch.channels_last)


@on_ranks(1, 2)
@pytest.mark.parametrize("last", [False, True])
def test_another_memory_format(world: World, last: bool) -> None:
    with folders(world) as (folder, storage):
        torch.manual_seed(world.seed)
        source, _ = prepared(world, Channels(last), storage)
        zero_ext.save_checkpoint(folder, source).wait()
        model, _ = prepared(world, Channels(not last), storage)
        with pytest.raises(ValueError, match=r"another memory format.*load_weights\(\.\.\., strict=False\)"):
            zero_ext.load_checkpoint(folder, model)
        zero_ext.load_weights(model, folder)
        wanted, found = zero_ext.full_state_dict(source), zero_ext.full_state_dict(model)
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
        write_weights(folder, wanted)  # found before the checkpoints beside it, of another model
        model, _ = prepared(world, Channels(not last), storage)
        zero_ext.load_weights(model, folder)
        found = zero_ext.full_state_dict(model)
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


@on_ranks(1, 2)
def test_another_head(world: World) -> None:
    with folders(world) as (folder, storage):
        source, _ = trained(world, storage, world.seed)
        zero_ext.save_checkpoint(folder, source).wait()
        torch.manual_seed(world.seed + 1)
        other = Mixture()
        del other.frozen
        other.classes = nn.Linear(5, 2)
        model, _ = prepared(world, other, storage)
        before = zero_ext.full_state_dict(model)
        with pytest.raises(ValueError, match=r"lack \['classes.weight'.*have \['frozen.weight'"):
            zero_ext.load_weights(model, folder)
        found = zero_ext.full_state_dict(model)
        assert all(torch.equal(found[name], value) for name, value in before.items())
        missing, unexpected = zero_ext.load_weights(model, folder, strict=False)
        assert missing == ["classes.weight", "classes.bias"]
        assert unexpected == ["frozen.weight", "frozen.bias"]
        saved, found = saved_by(world, source), zero_ext.full_state_dict(model)
        for name, value in found.items():
            assert torch.equal(value, before[name] if name in missing else saved[name]), name


@on_ranks(1, 2)
def test_damage_is_found_before_anything_changes(world: World) -> None:
    with folders(world) as (folder, storage):
        source, _ = trained(world, storage, world.seed)
        path = zero_ext.save_checkpoint(folder, source).wait()
        if world.rank == 0:
            (file, *_) = sorted(path.glob("*.safetensors"))
            content = bytearray(file.read_bytes())
            content[-1000:] = bytes(1000)
            file.write_bytes(content)
        world.barrier()
        model, _ = trained(world, storage, world.seed + 1)
        before = zero_ext.full_state_dict(model)
        with pytest.raises(CheckpointError, match="Nothing of the model was changed"):
            zero_ext.load_weights(model, folder)
        found = zero_ext.full_state_dict(model)
        assert all(torch.equal(found[name], value) for name, value in before.items())
        model(*batch_of(world, world.seed, 1)).backward()


@on_ranks(2)
def test_ranks_that_name_different_steps(world: World) -> None:
    with folders(world) as (folder, storage):
        model, _ = trained(world, storage, world.seed)
        for step in (1, 2):
            zero_ext.save_checkpoint(folder, model, step=step).wait()
        with pytest.raises(CheckpointError, match="different files"):
            zero_ext.load_weights(model, folder, step=1 + world.rank)
        assert zero_ext.load_weights(model, folder, step=1) == ([], [])


@on_ranks(2)
def test_ranks_that_rename_otherwise(world: World) -> None:
    with folders(world) as (folder, storage):
        model, _ = prepared(world, nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), storage)
        zero_ext.save_checkpoint(folder, model).wait()
        swap = {"0.weight": "1.weight", "1.weight": "0.weight"}
        with pytest.raises(CheckpointError, match="different arguments"):
            zero_ext.load_weights(model, folder, rename=swap if world.rank else None)
        assert zero_ext.load_weights(model, folder, rename=swap) == ([], [])


@on_ranks(2)
@pytest.mark.parametrize("call", ["load_weights", "load_checkpoint"])
@pytest.mark.parametrize("stage", [0, 1])
def test_compressed_optimizers_follow_the_weights(world: World, call: str, stage: int) -> None:
    with folders(world) as (folder, _):
        torch.manual_seed(world.seed)
        model = nn.Linear(40, 40)
        made = zero_ext.OneBitAdam(model.parameters(), lr=1e-2, freeze_step=2)
        model, optimizer = zero_ext.prepare(model, made, {"stage": stage}, process_group=world.group)

        def train(steps: int) -> None:
            for step in range(steps):
                torch.manual_seed(world.seed + 10 * step + world.rank)
                model(torch.randn(4, 40)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

        zero_ext.save_checkpoint(folder, model).wait()
        wanted = zero_ext.full_state_dict(model)
        train(6)
        if call == "load_weights":
            zero_ext.load_weights(model, folder)
        else:
            zero_ext.load_checkpoint(folder, model, optimizer=False)
        found = zero_ext.full_state_dict(model)
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
        train(1)
        moved = zero_ext.full_state_dict(model)
        assert all(0 < (moved[name] - value).abs().max() < 0.05 for name, value in wanted.items())


@on_ranks(1, 2)
def test_a_checkpoint_without_its_optimizer(world: World) -> None:
    with folders(world) as (folder, storage):
        source, other = trained(world, storage, world.seed)
        schedule = StepLR(other, 1)
        schedule.step()
        zero_ext.save_checkpoint(folder, source, scheduler=schedule, client_state="epoch 3").wait()
        torch.manual_seed(world.seed + 1)
        model = Mixture()
        made = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], 0.1, momentum=0.9)
        config = {"stage": 2, "timeout_seconds": 120.0}
        model, optimizer = zero_ext.prepare(model, made, config, process_group=world.group)
        before = zero_ext.full_state_dict(model)
        with pytest.raises(ValueError, match=r"optimizer=False for the weights alone"):
            zero_ext.load_checkpoint(folder, model)
        found = zero_ext.full_state_dict(model)
        assert all(torch.equal(found[name], value) for name, value in before.items())
        schedule = StepLR(optimizer, 1)
        random = torch.get_rng_state()
        loaded = zero_ext.load_checkpoint(folder, model, scheduler=schedule, optimizer=False)
        assert (loaded.step, loaded.client_state) == (1, "epoch 3")
        assert schedule.last_epoch == 1 and engine_of(model).steps == 0
        assert torch.equal(torch.get_rng_state(), random)
        saved, found = saved_by(world, source), zero_ext.full_state_dict(model)
        assert all(torch.equal(found[name], value) for name, value in saved.items())
        engine_of(model).optimizer_step.damage = "the step broke off"
        with pytest.raises(RuntimeError, match="damaged: the step broke off"):
            zero_ext.load_checkpoint(folder, model, optimizer=False)


@pytest.mark.parametrize(
    ("names", "step", "error", "pattern"),
    [
        (
            ["pytorch_model.bin"],
            None,
            CheckpointError,
            r"model.safetensors or .* got \['pytorch_model.bin'\]",
        ),
        ([], None, CheckpointError, r"checkpoints of zero_ext, or one of DeepSpeed's .* got \[\]"),
        (["latest"], None, CheckpointError, "latest: expected the name of a folder"),
        (["model.safetensors"], 3, CheckpointError, r"got \['model.safetensors'\] and step 3, which only"),
    ],
)
def test_what_is_no_folder_of_weights(
    tmp_path: Path, names: list[str], step: int | None, error: type[Exception], pattern: str
) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(error, match=pattern):
        open_weights(tmp_path, step)
