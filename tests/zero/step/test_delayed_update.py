"""Delayed updates against a plain loop with parameters one step old, bit for bit; what disturbs them."""

from __future__ import annotations

import copy
import errno
import gc
import itertools
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import ChosenBlocks, language_batch, language_loss
from tests.zero.step.stale_loop import (
    Case,
    Gate,
    backward_of,
    configuration,
    maker,
    train_delayed,
    train_stale,
)
from tests.zero.training import check_same
from tests.zero.training import prepared as prepared_for
from zero_ext import ops
from zero_ext.plan import TrainingState, model_state_bytes
from zero_ext.zero import engine_of

CASES = [
    Case(),
    Case(fused=False, clip=0.1),
    Case(micro_batches=2, clip=0.1),
    Case(dtype="bf16", micro_batches=2, undelayed=2),
    Case(dtype="bf16", clip=0.1, read_after=1),
    Case(dtype="fp16", overflow_at=2, fused=False),
    Case(dtype="fp16", overflow_at=1, clip=0.5),
    Case(muon=True),
    Case(muon=True, dtype="bf16", micro_batches=2, clip=0.1, undelayed=2),
    Case(muon=True, dtype="fp16", overflow_at=2, read_after=1),
]
TIERS = [
    {"optimizer": "host"},
    {"optimizer": "nvme"},
    {"optimizer": "host", "grads": "host"},
    {"optimizer": "nvme", "grads": "host"},
    {"optimizer": "host", "grads": "host", "params": "host"},
    {"optimizer": "nvme", "params": "nvme"},
    {"optimizer": "host", "params": "nvme", "grads": "nvme"},
    {"optimizer": "nvme", "grads": "nvme"},
    {"optimizer": "host", "ratio": 0.5},
]


def least_stage(tiers: dict[str, Any]) -> int:
    return 3 if "params" in tiers else 2 if "grads" in tiers else 1


@on_ranks(1, 2, 3, by_turns=True)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_equals_the_stale_loop(world: World, stage: int) -> None:
    for number, case in enumerate(CASES):
        if world.size != 2 and (number + stage) % 3:
            continue
        torch.manual_seed(world.seed)
        model = ChosenBlocks()
        losses, parameters = train_stale(world, copy.deepcopy(model), stage, case)
        fitting = [each for each in TIERS if least_stage(each) <= stage]
        offload = fitting[(number + stage) % len(fitting)]
        late = (number + world.size) % 2 == 0
        found, values = train_delayed(world, copy.deepcopy(model), stage, case, offload, late)
        where = f"{case} {offload} late={late}"
        assert found == losses, where
        check_same(values, parameters, where)


def prepared(world: World, stage: int = 2, dtype: str = "bf16", clip: float = 0.0, **offload: Any) -> Any:
    torch.manual_seed(world.seed)
    section = {"optimizer": "host", "update_mode": "delayed", "staging_buffer_bytes": 1 << 20, **offload}
    config = configuration(Case(dtype=dtype, clip=clip), offload=section)
    return prepared_for(world, ChosenBlocks(), stage, maker(True), **config)


def train_step(world: World, model: Any, optimizer: Any, step: int) -> list[float]:
    losses = backward_of(world, model, Case(), step)
    optimizer.step()
    optimizer.zero_grad()
    return losses


@on_ranks(1, 2)
def test_updates_run_on_a_thread_of_their_own_once_delayed(world: World) -> None:
    model, optimizer = prepared(world, delay_start_step=1)
    gate = Gate(engine_of(model))
    gate.open()
    train_step(world, model, optimizer, 0)
    assert gate.threads == {threading.get_ident()} and not engine_of(model).updates.in_progress
    train_step(world, model, optimizer, 1)
    assert engine_of(model).updates.in_progress
    model.finish_update()
    assert len(gate.threads) == 2 and not engine_of(model).updates.in_progress


@on_ranks(1, 2)
def test_bytes_held_and_moved(world: World) -> None:
    for dtype, stage in itertools.product(("fp32", "bf16"), (1, 2, 3)):
        model, optimizer = prepared(world, stage, dtype)
        engine = engine_of(model)
        for step in (1, 3, 5):
            train_step(world, model, optimizer, step)
        breakdown, padded = engine.memory_breakdown(), sum(unit.layout.numel for unit in engine.units)
        wanted = model_state_bytes(stage, world.size, TrainingState({dtype: padded}), delayed=True)
        assert [breakdown[kind] for kind in ("params", "grads", "optimizer")] == [*vars(wanted).values()]
        shard = padded // world.size * (4 if dtype == "fp32" else 2)
        moved = engine.tiers.transfers.last_moved
        assert moved == {("device", "host"): shard, ("host", "device"): shard}


@on_ranks(1, 2)
def test_a_resumed_run_equals_the_one_that_saved(world: World) -> None:
    with tempfile.TemporaryDirectory() as nvme, tempfile.TemporaryDirectory() as saves:
        saves = world.everyone(saves)[0]
        model, optimizer = prepared(world, 3, optimizer="nvme", nvme_paths=[nvme])
        for step in range(3):
            train_step(world, model, optimizer, step)
        zero_ext.save_checkpoint(saves, model)
        wanted = [train_step(world, model, optimizer, step) for step in range(3, 6)]
        full = zero_ext.full_state_dict(model)
        model, optimizer = prepared(world, 2)
        train_step(world, model, optimizer, 9)  # an update under way does not survive the load
        zero_ext.load_checkpoint(saves, model)
        assert [train_step(world, model, optimizer, step) for step in range(3, 6)] == wanted
        check_same(model, full)
        world.barrier()


@on_ranks(1, 2)
@pytest.mark.parametrize("stage", [2, 3])
def test_state_is_read_and_edited_as_after_the_update(world: World, stage: int) -> None:
    def trained() -> tuple[Any, Any]:
        model, optimizer = prepared(world, stage)
        for step in range(2):
            train_step(world, model, optimizer, step)
        return model, optimizer

    model, optimizer = trained()
    model.finish_update()
    wanted, state = zero_ext.full_state_dict(model), optimizer.state_dict()
    model, optimizer = trained()
    with zero_ext.gathered(model):
        before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    assert any(not torch.equal(before[name], wanted[name]) for name in before)  # what forward uses
    found = optimizer.state_dict()
    assert engine_of(model).updates.in_progress and found["scalars"] == state["scalars"]
    check_same(found["shards"], state["shards"])
    with zero_ext.gathered(model, modifier_rank=0), torch.no_grad():
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, wanted[name])
        model.norm.weight.fill_(0.5)
    assert bool((zero_ext.full_state_dict(model)["norm.weight"] == 0.5).all())
    model, optimizer = trained()
    optimizer.load_state_dict(state)
    model, optimizer = trained()
    assert zero_ext.load_full_state_dict(model, before) == ([], [])
    assert torch.equal(zero_ext.full_state_dict(model)["head.weight"], before["head.weight"])


@on_ranks(1, 2)
def test_misuse_is_refused(world: World) -> None:
    model, optimizer = prepared(world, 3, params="host")
    train_step(world, model, optimizer, 0)
    loss = language_loss(model, language_batch(world.seed, 1, 0, world.rank))
    zero_ext.full_state_dict(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    optimizer.zero_grad()
    train_step(world, model, optimizer, 0)
    inside = pytest.raises(RuntimeError, match="inside forward, backward or")
    with zero_ext.gathered(model.norm.weight), inside:
        zero_ext.full_state_dict(model)
    handle = model.norm.register_forward_hook(lambda *_: model.finish_update())
    with inside:
        train_step(world, model, optimizer, 1)
    handle.remove()
    train_step(world, model, optimizer, 1)


@on_ranks(1, 2)
def test_a_step_with_refused_settings_can_be_made_again(world: World) -> None:
    section = {"optimizer": "host", "update_mode": "delayed", "staging_buffer_bytes": 1 << 20}
    scale = {"initial_power": 8, "window": 2}
    config = configuration(Case(dtype="fp16"), offload=section, loss_scale=scale)

    def trained(refused: bool) -> Any:
        torch.manual_seed(world.seed)
        model, optimizer = prepared_for(world, ChosenBlocks(), 2, maker(True, muon=True), **config)
        for step in range(3):
            backward_of(world, model, Case(), step)
            if refused and step == 1:
                rate = optimizer.param_groups[0]["lr"]
                optimizer.param_groups[0]["lr"] = float("nan")
                with pytest.raises(ValueError, match="lr"):
                    optimizer.step()
                optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        model.finish_update()
        return optimizer.state_dict()

    found, wanted = trained(refused=True), trained(refused=False)
    assert found["scalars"] == wanted["scalars"]
    check_same(found["shards"], wanted["shards"])


@on_ranks(1, 2)
def test_writes_during_an_update_are_refused(world: World) -> None:
    def write(model: Any, value: float) -> None:
        with torch.no_grad():
            model.norm.weight.fill_(value)

    model, optimizer = prepared(world, 3, params="host")
    train_step(world, model, optimizer, 0)
    handle = model.blocks[0].register_forward_hook(lambda *_, model=model: write(model, 0.5))
    with pytest.raises(RuntimeError, match=r"'norm\.weight': expected no write in a forward while"):
        train_step(world, model, optimizer, 1)
    handle.remove()
    optimizer.zero_grad()
    train_step(world, model, optimizer, 1)

    model, optimizer = prepared(world, 2)
    write(model, 0.5)  # before any update, as without delay
    train_step(world, model, optimizer, 0)
    model.finish_update()
    assert torch.equal(model.norm.weight.detach().float().round(decimals=1), torch.full((12,), 0.5))
    train_step(world, model, optimizer, 1)
    write(model, 0.25)
    with pytest.raises(RuntimeError, match=r"'norm\.weight': expected no write while a delayed update"):
        train_step(world, model, optimizer, 2)


@on_ranks(1, 2)
@pytest.mark.parametrize("surfaces_at", ["step", "read", "load"])
def test_a_failed_transfer_surfaces_on_all_ranks(world: World, surfaces_at: str) -> None:
    with tempfile.TemporaryDirectory() as nvme, tempfile.TemporaryDirectory() as saves:
        saves = world.everyone(saves)[0]
        model, optimizer = prepared(world, 2, optimizer="nvme", nvme_paths=[nvme])
        train_step(world, model, optimizer, 0)
        zero_ext.save_checkpoint(saves, model)
        wanted = [train_step(world, model, optimizer, step) for step in (1, 2)]
        model.finish_update()
        backward_of(world, model, Case(), 3)
        if world.rank == 0:
            ops.store_inject_fault(engine_of(model).tiers.store.handle, False, 0, -errno.EIO, 1)
        optimizer.step()
        optimizer.zero_grad()
        backward_of(world, model, Case(), 4)
        if surfaces_at != "load":
            with pytest.raises(RuntimeError, match=r"optimizer step failed on ranks \[0\]") as caught:
                if surfaces_at == "step":
                    optimizer.step()
                else:
                    optimizer.zero_grad()
                    zero_ext.full_state_dict(model)
            assert world.rank or "Input/output error" in str(caught.value)
            with pytest.raises(RuntimeError, match="its state is damaged"):
                zero_ext.save_checkpoint(saves, model)
        optimizer.zero_grad()
        zero_ext.load_checkpoint(saves, model)
        assert [train_step(world, model, optimizer, step) for step in (1, 2)] == wanted
        world.barrier()


@on_ranks(2, 3)
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_failed_read_of_gradients_is_an_error_on_all_ranks(world: World, clip: float) -> None:
    """Before any rank waits for another; the step is repeated."""
    with tempfile.TemporaryDirectory() as nvme:
        runs = []
        for faulty in (False, True):
            model, optimizer = prepared(world, 2, "fp32", clip, grads="nvme", nvme_paths=[nvme])
            train_step(world, model, optimizer, 0)
            model.finish_update()  # A repeated backward reads the parameters after the first update.
            if faulty:
                backward_of(world, model, Case(), 1)
                if world.rank == 1:
                    ops.store_inject_fault(engine_of(model).tiers.store.handle, False, 0, -errno.EIO, 1)
                began = time.monotonic()
                with pytest.raises(
                    RuntimeError, match=r"reading gradients.* failed on ranks \[1\]"
                ) as caught:
                    optimizer.step()
                assert time.monotonic() - began < 60  # of 120 seconds
                assert ("Input/output error" in str(caught.value)) == (world.rank == 1)
                assert "No parameter or optimizer state was changed" in str(caught.value)
                optimizer.zero_grad()
            for number in (1, 2):
                train_step(world, model, optimizer, number)
            runs.append(zero_ext.full_state_dict(model))
            assert engine_of(model).steps == 3
        check_same(*runs)
        world.barrier()


@on_ranks(1, 2)
def test_a_model_is_dropped_during_an_update(world: World) -> None:
    with tempfile.TemporaryDirectory() as nvme:
        model, optimizer = prepared(world, 3, optimizer="nvme", params="nvme", nvme_paths=[nvme])
        gate = Gate(engine_of(model))
        threads = threading.active_count()
        train_step(world, model, optimizer, 0)
        assert threading.active_count() == threads + 1
        threading.Timer(0.1, gate.open).start()
        del model, optimizer
        gc.collect()
        assert gate.threads and list(Path(nvme).iterdir()) == []


EXITS = """
import sys, torch, zero_ext
from zero_ext.zero import engine_of
from tests.zero.models import TinyModel, language_batch, language_loss
model = TinyModel()
offload = {"optimizer": "nvme", "nvme_paths": [sys.argv[1]], "update_mode": "delayed"}
model, optimizer = zero_ext.prepare(model, torch.optim.AdamW(model.parameters()), {"offload": offload})
language_loss(model, language_batch(0, 0, 0, 0)).backward()
optimizer.step()
assert engine_of(model).updates.in_progress
"""


def test_the_interpreter_exits_during_an_update(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXITS, str(tmp_path)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []
