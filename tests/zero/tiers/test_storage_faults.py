"""Storage that fails: an error on every rank, nothing silently wrong, no file left, the checkpoint good."""

from __future__ import annotations

import contextlib
import errno
import gc
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from unittest import mock

import pytest
import torch

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import TinyModel, language_batch, language_loss
from tests.zero.training import language_steps
from tests.zero.training import prepared as prepared_for
from zero_ext import ops
from zero_ext.offload import NvmeShard
from zero_ext.zero import engine_of
from zero_ext.zero.api.full_parameters import full_state


def prepared(world: World, folder: str, stage: int = 3, **more: Any) -> tuple[Any, Any]:
    torch.manual_seed(world.seed)
    tiers = {"params": "nvme", "grads": "host", "optimizer": "nvme", "nvme_paths": [folder]}
    offload = {**tiers, "staging_buffer_bytes": 1 << 20, **more}
    return prepared_for(world, TinyModel(), stage, timeout_seconds=30.0, offload=offload)


def step(world: World, model: Any, optimizer: Any, number: int) -> float:
    return language_steps(world, model, optimizer, [number])[0]


def inject(model: Any, writing: bool, first: int = 0, code: int = -errno.EIO, calls: int = 1) -> None:
    """``calls`` of the store's next transfers end with ``code``."""
    ops.store_inject_fault(engine_of(model).tiers.store.handle, writing, first, code, calls)


def flip_a_bit(folder: str, offset: int) -> None:
    with next(Path(folder).rglob("extents.bin")).open("r+b") as data:
        data.seek(offset)
        byte = data.read(1)
        data.seek(offset)
        data.write(bytes([byte[0] ^ 1]))


@on_ranks(1, 2)
@pytest.mark.parametrize("writing", [False, True])
def test_a_failed_transfer_ends_the_step_on_all_ranks(world: World, writing: bool) -> None:
    with tempfile.TemporaryDirectory() as nvme, tempfile.TemporaryDirectory() as saves:
        saves = world.everyone(saves)[0]
        model, optimizer = prepared(world, nvme)
        step(world, model, optimizer, 0)
        zero_ext.save_checkpoint(saves, model)
        wanted = [step(world, model, optimizer, number) for number in (1, 2)]
        language_loss(model, language_batch(world.seed, 3, 0, world.rank)).backward()
        if world.rank == 0:
            inject(model, writing)
        with pytest.raises(RuntimeError, match=r"optimizer step failed on ranks \[0\]") as caught:
            optimizer.step()
        if world.rank == 0:
            assert "Input/output error" in str(caught.value) and "extents.bin" in str(caught.value)
        with pytest.raises(RuntimeError, match="its state is damaged"):
            step(world, model, optimizer, 4)
        optimizer.zero_grad()
        zero_ext.load_checkpoint(saves, model)
        assert [step(world, model, optimizer, number) for number in (1, 2)] == wanted
        world.barrier()


@on_ranks(2, 3)
@pytest.mark.parametrize("backward", [False, True])
def test_a_failed_read_of_parameters_is_raised_on_all_ranks(world: World, backward: bool) -> None:
    with tempfile.TemporaryDirectory() as nvme:
        model, optimizer = prepared(world, nvme)
        step(world, model, optimizer, 0)
        batch = language_batch(world.seed, 1, 0, world.rank)
        loss = language_loss(model, batch) if backward else None
        if world.rank == 1:
            inject(model, False)
        began = time.monotonic()
        with pytest.raises(
            RuntimeError, match=r"rank 1: the shard of unit '[^']+' .*could not be read"
        ) as caught:
            if loss is not None:
                loss.backward()
            else:
                language_loss(model, batch)
        assert "Input/output error" in str(caught.value) and time.monotonic() - began < 28  # of 30 seconds
        assert ("from the last checkpoint" in str(caught.value)) == (world.rank == 1)
        with pytest.raises(RuntimeError, match="could not be read"):
            language_loss(model, batch)
        assert time.monotonic() - began < 29
        world.barrier()


@on_ranks(2, 3)
def test_a_failed_prefetch_that_nobody_needs_is_raised_as_well(world: World) -> None:
    """It comes up where what is under way is dropped: in a step after an evaluation."""
    with tempfile.TemporaryDirectory() as nvme:
        model, optimizer = prepared(world, nvme)
        step(world, model, optimizer, 0)
        batch = language_batch(world.seed, 1, 0, world.rank)
        language_loss(model, batch).backward()
        engine = engine_of(model)

        def fail(*_: object) -> None:
            for unit in engine.units:  # the fault is for the read started next, not for one under way
                if unit._copy is not None:
                    unit._copy.wait()
            inject(model, False)

        with torch.no_grad():
            model(batch)
            if world.rank == 1:
                model.norm.register_forward_pre_hook(fail)
            model(batch)
        began = time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            optimizer.step()
        assert time.monotonic() - began < 28  # of 30 seconds
        if world.rank == 1:
            assert re.search(r"rank 1: the shard of unit '[^']+' .*could not be read", str(caught.value))
        world.barrier()


@on_ranks(1)
def test_a_single_rank_goes_on_after_a_failed_read_of_parameters(world: World) -> None:
    with tempfile.TemporaryDirectory() as nvme:
        losses = []
        for faulty in (False, True):
            model, optimizer = prepared(world, nvme)
            if faulty:
                inject(model, False)
                with pytest.raises(RuntimeError, match=r"could not be read: (?s:.*)Nothing was changed"):
                    language_loss(model, language_batch(world.seed, 0, 0, 0))
            losses += [step(world, model, optimizer, number) for number in range(2)]
        assert losses[:2] == losses[2:]


@on_ranks(1)
def test_an_interrupted_or_short_transfer_is_no_error(world: World) -> None:
    with tempfile.TemporaryDirectory() as nvme:
        losses = []
        for faulty in (False, True):
            model, optimizer = prepared(world, nvme)
            for number in range(3):
                for writing in (False, True) if faulty else ():
                    inject(model, writing, number, -errno.EINTR, 2)
                    inject(model, writing, number + 2, 512)
                losses.append(step(world, model, optimizer, number))
        assert losses[:3] == losses[3:]


@on_ranks(1, 2)
def test_bad_paths_are_refused_on_all_ranks_before_anything_changes(world: World) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "file"
        file.write_text("")
        for path in (file / "below", file):
            model = TinyModel()
            before = [parameter.data_ptr() for parameter in model.parameters()]
            good = world.rank != 0
            paths = [folder if good else str(path)]
            config = {"offload": {"optimizer": "nvme", "nvme_paths": paths, "staging_buffer_bytes": 1 << 20}}
            optimizer = torch.optim.AdamW(model.parameters())
            with pytest.raises(RuntimeError, match=r"on ranks \[0\]") as caught:
                zero_ext.prepare(model, optimizer, config, process_group=world.group)
            assert good or str(path) in str(caught.value)
            assert [parameter.data_ptr() for parameter in model.parameters()] == before
        del caught
        gc.collect()
        assert [entry.name for entry in Path(folder).iterdir()] == ["file"]


@on_ranks(1)
def test_a_damaged_extent_is_found(world: World) -> None:
    with tempfile.TemporaryDirectory() as nvme:
        model, optimizer = prepared(world, nvme, checksum=True)
        step(world, model, optimizer, 0)
        language_loss(model, language_batch(world.seed, 1, 0, 0)).backward()
        flip_a_bit(nvme, engine_of(model).masters[0].state.offset + 100)
        with pytest.raises(RuntimeError, match=r"CRC32C(?s:.*)Load the last checkpoint"):
            optimizer.step()


def write_alike(model: Any) -> None:
    with torch.no_grad():
        next(iter(model.parameters())).mul_(0.5)


def gather_and_write(model: Any) -> None:
    with zero_ext.gathered(model.embedding.weight, modifier_rank=0):
        write_alike(model)


class Fault(NamedTuple):
    """A transfer that fails: the stage, whether it writes, what precedes it, and the call that meets it."""

    stage: int
    writing: bool
    before: Callable[[Any], None]
    meet: Callable[[Any, Any], Any]


FAULTS = {
    "step after a write": Fault(1, False, write_alike, lambda _, optimizer: optimizer.step()),
    "step, masters written": Fault(1, True, write_alike, lambda _, optimizer: optimizer.step()),
    "master": Fault(3, False, lambda _: None, lambda model, _: list(map(full_state, model.parameters()))),
    "gathered": Fault(3, True, lambda _: None, lambda model, _: gather_and_write(model)),
    "write in the loop": Fault(3, True, lambda _: None, lambda model, _: write_alike(model)),
}


@on_ranks(2)
@pytest.mark.parametrize("case", FAULTS)
def test_a_transfer_that_fails_on_one_rank_raises_on_all(world: World, case: str) -> None:
    stage, writing, before, meet = FAULTS[case]
    with tempfile.TemporaryDirectory() as nvme:
        model, optimizer = prepared(world, nvme, stage, params="device", grads="device")
        step(world, model, optimizer, 0)
        language_loss(model, language_batch(world.seed, 1, 0, world.rank)).backward()
        before(model)
        if world.rank == 1:
            inject(model, writing)
        with pytest.raises(RuntimeError, match=r"failed on ranks \[1\]") as caught:
            meet(model, optimizer)
        assert ("Input/output error" in str(caught.value)) == (world.rank == 1)
        if case.startswith("step"):
            optimizer.step()  # nothing had changed
        world.barrier()


@on_ranks(2)
def test_gradients_that_cannot_be_read_to_be_added_to_raise_in_the_step_of_all_ranks(world: World) -> None:
    with tempfile.TemporaryDirectory() as nvme:
        model, optimizer = prepared(world, nvme, grads="nvme", params="device")
        language_loss(model, language_batch(world.seed, 0, 0, world.rank)).backward()

        def fail(*_: object) -> NoReturn:
            raise RuntimeError("no request can be made")

        fails = mock.patch.object(NvmeShard, "fetch", fail) if world.rank else contextlib.nullcontext()
        with fails, pytest.raises(RuntimeError, match=r"keeping gradients on NVMe failed on ranks \[1\]"):
            language_loss(model, language_batch(world.seed, 1, 0, world.rank)).backward()
        optimizer.zero_grad()
        step(world, model, optimizer, 2)
        world.barrier()
