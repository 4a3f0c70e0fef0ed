"""Paths and limits that training on NVMe meets: refused on all ranks with nothing changed, or harmless."""

from __future__ import annotations

import errno
import fcntl
import gc
import importlib
import os
import re
import resource
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import zero_ext
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.models import TinyModel
from tests.zero.tiers.test_storage_faults import flip_a_bit, step
from tests.zero.training import prepared as prepared_for
from zero_ext.zero import engine_of

RING = 1 << 20


def prepared(world: World, folder: str | None, aio: dict[str, Any] | None = None, **more: Any) -> Any:
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
        made = prepared(world, folder)
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
                prepared(world, path if faulty else folder)
            assert not faulty or re.search(pattern, str(caught.value))
            del caught
            gc.collect()
            assert list(Path(folder).iterdir()) == []
        assert losses(world, prepared(world, folder)) == wanted


@on_ranks(1, 2)
def test_limits_and_sizes_that_only_cost_time(world: World) -> None:
    wanted = losses(world, prepared(world, None))
    settings: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"block_bytes": 4096, "queue_depth": 1}, {}),  # a chunk is many blocks
        ({"block_bytes": 1 << 26}, {"checksum": True}),  # a block is many rings
    ]
    for aio, more in settings:
        with tempfile.TemporaryDirectory() as folder, soft_limit(resource.RLIMIT_MEMLOCK, 0):
            assert losses(world, prepared(world, folder, aio, **more)) == wanted
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        made = prepared(world, folder)
        assert losses(world, made) == wanted
        why = engine_of(made[0]).tiers.store.facts().devices[0].why_not_direct
        assert bool(why) == any("through the page cache" in str(one.message) for one in seen)


@on_ranks(2)
def test_a_ring_smaller_than_a_block_is_refused_by_name(world: World) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with pytest.raises(ValueError, match=r"offload\.staging_buffer_bytes.*at least 1048576"):
            prepared(world, folder, staging_buffer_bytes=4096)
        assert not list(Path(folder).iterdir())


@on_ranks(1, 2)
def test_two_jobs_on_one_path_do_not_touch_each_other(world: World) -> None:
    wanted = losses(world, prepared(world, None))
    with tempfile.TemporaryDirectory() as folder:
        folder = world.everyone(folder)[0]
        one, other = prepared(world, folder), prepared(world, folder)
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
        made = prepared(world, nvme, checksum=True)
        losses(world, made)
        zero_ext.save_checkpoint(saves, made[0])
        if world.rank == 0:
            flip_a_bit(nvme, engine_of(made[0]).units[0].storage.offset)
        with pytest.raises(RuntimeError, match=r"rank 0: the shard of unit .*CRC32C"):
            step(world, *made, 2)
        del made
        gc.collect()
        assert list(Path(nvme).iterdir()) == []
        again, reference = prepared(world, nvme), prepared(world, None)
        wanted = losses(world, reference) + losses(world, reference, 2)
        zero_ext.load_checkpoint(saves, again[0])
        assert losses(world, again, 2) == wanted[2:]
        world.barrier()
