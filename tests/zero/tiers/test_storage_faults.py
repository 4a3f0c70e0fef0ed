"""Storage that fails or cannot be used: an error on every rank, no file left, the checkpoint good."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import importlib
import os
import re
import resource
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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


RING = 1 << 20


def prepared_below(world: World, folder: str | None, aio: dict[str, Any] | None = None, **more: Any) -> Any:
    """Model and optimizer with all state below ``folder``, or in memory."""
    torch.manual_seed(world.seed)
    nvme = {"params": "nvme", "optimizer": "nvme", "nvme_paths": [folder], "staging_buffer_bytes": RING}
    return prepared_for(world, TinyModel(), offload={**nvme, **more} if folder else {}, aio=aio or {})


def losses(world: World, made: Any, first: int = 0) -> list[float]:
    return [step(world, *made, number) for number in range(first, first + 2)]


@contextmanager
def soft_limit(kind: int, value: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


@contextmanager
def without_locks() -> Iterator[None]:
    """What a network file system without a lock service answers."""
    refusal = OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    with mock.patch.object(fcntl, "flock", side_effect=refusal):
        yield


@contextmanager
def while_storage_is_set_up(fault: AbstractContextManager[None]) -> Iterator[None]:
    module = importlib.import_module("zero_ext.zero.api.prepare")
    real = module._make_tiers

    def make(*arguments: Any) -> Any:
        with fault:
            return real(*arguments)

    with mock.patch.object(module, "_make_tiers", make):
        yield


@on_ranks(1, 2)
def test_what_cannot_hold_the_state_is_refused_on_all_ranks(world: World) -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = prepared_below(world, folder)
        wanted = losses(world, made)
        capacity = engine_of(made[0]).tiers.store.facts().capacity
        del made
        gc.collect()
        full, nearly = (soft_limit(resource.RLIMIT_FSIZE, size) for size in (4096, capacity - 4096))
        read_only = "/sys/kernel"  # to root as well
        too_large = rf"'{folder}/.*(free there|File too large)"
        for fault, path, pattern in (
            (full, folder, too_large),
            (nearly, folder, too_large),
            (without_locks(), folder, "this file system has no locks"),
            (nullcontext(), read_only, f"nvme path '{read_only}': no directory can be made in it"),
        ):
            faulty = world.rank == 0
            with (
                while_storage_is_set_up(fault) if faulty else nullcontext(),
                pytest.raises(RuntimeError, match=r"setting up storage .* on ranks \[0\]") as caught,
            ):
                prepared_below(world, path if faulty else folder)
            assert not faulty or re.search(pattern, str(caught.value))
            del caught
            gc.collect()
            assert list(Path(folder).iterdir()) == []
        assert losses(world, prepared_below(world, folder)) == wanted


@on_ranks(1, 2)
def test_limits_and_sizes_that_only_cost_time(world: World) -> None:
    wanted = losses(world, prepared_below(world, None))
    settings: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"block_bytes": 4096, "queue_depth": 1}, {}),  # a chunk is many blocks
        ({"block_bytes": 1 << 26}, {"checksum": True}),  # a block is many rings
    ]
    for aio, more in settings:
        with tempfile.TemporaryDirectory() as folder, soft_limit(resource.RLIMIT_MEMLOCK, 0):
            assert losses(world, prepared_below(world, folder, aio, **more)) == wanted
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        made = prepared_below(world, folder)
        assert losses(world, made) == wanted
        why = engine_of(made[0]).tiers.store.facts().devices[0].why_not_direct
        assert bool(why) == any("through the page cache" in str(one.message) for one in seen)


@on_ranks(2)
def test_a_ring_smaller_than_a_block_is_refused_by_name(world: World) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with pytest.raises(ValueError, match=r"offload\.staging_buffer_bytes.*at least 1048576"):
            prepared_below(world, folder, staging_buffer_bytes=4096)
        assert not list(Path(folder).iterdir())


@on_ranks(1, 2)
def test_two_jobs_on_one_path_do_not_touch_each_other(world: World) -> None:
    wanted = losses(world, prepared_below(world, None))
    with tempfile.TemporaryDirectory() as folder:
        folder = world.everyone(folder)[0]
        one, other = prepared_below(world, folder), prepared_below(world, folder)
        first = losses(world, one)
        world.barrier()
        assert len(list(Path(folder).iterdir())) == 2 * world.size
        world.barrier()
        del one
        gc.collect()
        assert first == wanted and losses(world, other) == wanted
        del other
        gc.collect()
        world.barrier()
        assert list(Path(folder).iterdir()) == []
        world.barrier()


@on_ranks(1, 2)
def test_a_damaged_shard_is_found_on_all_ranks_and_the_checkpoint_is_good(world: World) -> None:
    with tempfile.TemporaryDirectory() as nvme, tempfile.TemporaryDirectory() as saves:
        saves = world.everyone(saves)[0]
        made = prepared_below(world, nvme, checksum=True)
        losses(world, made)
        zero_ext.save_checkpoint(saves, made[0])
        if world.rank == 0:
            flip_a_bit(nvme, engine_of(made[0]).units[0].storage.offset)
        with pytest.raises(RuntimeError, match=r"rank 0: the shard of unit .*CRC32C"):
            step(world, *made, 2)
        del made
        gc.collect()
        assert list(Path(nvme).iterdir()) == []
        again, reference = prepared_below(world, nvme), prepared_below(world, None)
        wanted = losses(world, reference) + losses(world, reference, 2)
        zero_ext.load_checkpoint(saves, again[0])
        assert losses(world, again, 2) == wanted[2:]
        world.barrier()
