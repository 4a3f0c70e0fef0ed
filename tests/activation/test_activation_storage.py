"""Extents are reused: a run of any length and any mixture of sizes allocates what its peak needs."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.activation.blocks import WIDTH, Stack, fresh_seed, gradients, same
from zero_ext import ops
from zero_ext.activation import ActivationCheckpointing
from zero_ext.activation import activation_storage as activation_storage
from zero_ext.activation.activation_storage import (
    ActivationExtent,
    ActivationStorage,
    BufferFullError,
    MemoryActivationStorage,
    NvmeActivationStorage,
)
from zero_ext.config import ActivationCheckpointingConfig
from zero_ext.offload import CPU, NvmeStore

MIB = 2**20


def filled(nbytes: int, fill: int) -> torch.Tensor:
    return torch.full((nbytes,), fill, dtype=torch.uint8)


def put(storage: ActivationStorage, values: torch.Tensor) -> ActivationExtent:
    return storage.put(values.nbytes, lambda memory: memory.copy_(values))


def test_random_extents_return_what_was_put(tmp_path: Path) -> None:
    seed = fresh_seed()
    with NvmeStore([tmp_path]) as store:
        for storage in (MemoryActivationStorage("host", CPU), NvmeActivationStorage(store, CPU, MIB)):
            draw, live = random.Random(seed), []
            for step in range(200):
                if live and draw.random() < 0.5:
                    extent, fill, nbytes = live.pop(draw.randrange(len(live)))
                    found = filled(nbytes, 0xEE)
                    storage.fetch(extent, found).wait()
                    assert bool((found == fill).all())
                    storage.release(extent)
                else:
                    nbytes = draw.randrange(1, 200) * 4096
                    live.append((put(storage, filled(nbytes, step % 251)), step % 251, nbytes))
                assert storage.used_bytes() == sum(nbytes for _, _, nbytes in live)
            for extent, _, _ in live:
                storage.release(extent)
            assert storage.used_bytes() == 0


@pytest.mark.parametrize("name", ["host", "nvme", "contiguous"])
def test_a_thousand_steps_leave_no_growth(name: str, tmp_path: Path) -> None:
    """Three forwards at a time wait for their backward, which come in any order, with lengths that change:
    extents become free between others, in storage of a few calls' size."""
    draw, source = random.Random(fresh_seed()), torch.rand(480, WIDTH, requires_grad=True)
    policies: dict[str, dict[str, Any]] = {
        "host": {"tier": "host"},
        "nvme": {"tier": "nvme", "nvme_paths": (str(tmp_path),), "buffer_bytes": MIB},
        "contiguous": {"contiguous_memory_optimization": True, "number_checkpoints": 9},
    }
    checkpointing = ActivationCheckpointing(ActivationCheckpointingConfig(**policies[name]))
    tier, waiting, held, most = checkpointing.config.storage_tier, list[torch.Tensor](), list[int](), 0
    with (
        mock.patch.object(activation_storage, "_BLOCK_BYTES", MIB // 4),
        mock.patch.object(activation_storage, "_STORE_GROWTH_BYTES", MIB // 4),
    ):
        for _ in range(1000):
            # One buffer has extents of the first call's size, others accept any size.
            hidden = source[: 240 if name == "contiguous" else draw.randrange(16, 480)]
            for _ in range(3):
                hidden = checkpointing(torch.sin, hidden * 1)
            waiting.append(hidden.sum())
            del hidden
            most = max(most, checkpointing.used_bytes())
            held.append(checkpointing.allocated_bytes()[tier])
            if len(waiting) == 3:
                waiting.pop(draw.randrange(3)).backward()
    waiting.clear()
    gc.collect()
    assert checkpointing.used_bytes() == 0
    assert most > 2 * MIB // 4
    if name == "contiguous":
        assert set(held) == {9 * 240 * WIDTH * 4}
    assert max(held) <= 2 * most and max(held[500:]) <= max(held[:500]) + MIB // 2


def test_lengths_beyond_a_block_allocate_at_most_twice_the_peak() -> None:
    storage, draw, most = MemoryActivationStorage("host", CPU), random.Random(fresh_seed()), 0
    for step in range(300):
        nbytes = (20 + step // 10 + draw.randrange(8)) * 64 * 1024
        extents = [put(storage, filled(nbytes, 1)) for _ in range(12)]
        most = max(most, storage.used_bytes())
        for extent in reversed(extents):
            storage.release(extent)
        assert storage.allocated_bytes()["host"] <= 2 * most + 16 * MIB


def test_one_buffer_of_so_many_calls() -> None:
    storage = MemoryActivationStorage("device", CPU, calls=2)
    first = put(storage, filled(100 * 4096, 1))
    assert storage.allocated_bytes() == {"device": 2 * 100 * 4096}
    small = [put(storage, filled(50 * 4096, 2)) for _ in range(2)]
    with pytest.raises(
        BufferFullError, match="number_checkpoints: the buffer of 819200 bytes for 2 calls stores 819200"
    ):
        put(storage, filled(1, 3))
    storage.release(first)
    put(storage, filled(100 * 4096, 4))
    assert len(small) == 2 and storage.allocated_bytes() == {"device": 2 * 100 * 4096}


def test_memory_of_the_device_is_filled_in_place() -> None:
    """Nothing is copied twice; and an extent that could not be filled is free again."""
    storage, seen = MemoryActivationStorage("host", CPU), list[torch.Tensor]()
    extent = storage.put(4096, lambda memory: seen.append(memory.fill_(7)))
    assert extent.memory is not None and seen[0].data_ptr() == extent.memory.data_ptr()

    def fails(memory: torch.Tensor) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        storage.put(4096, fails)
    assert storage.used_bytes() == 4096


class LateStore:
    """Storage whose writes end when they are waited for, in the order of ``done``."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self._free = [0, MIB]

    def facts(self) -> SimpleNamespace:
        return SimpleNamespace(largest_free=MIB, capacity=2 * MIB)

    def allocate(self, nbytes: int) -> int:
        return self._free.pop(0)

    def release(self, offset: int) -> None:
        self.done.append(f"released {offset}")
        self._free.insert(0, offset)

    def write(self, offset: int, chunk: torch.Tensor) -> LateWrite:
        self.done.append(f"began {offset}")
        return LateWrite(self.done, offset)


class LateWrite:
    """A write of :class:`LateStore`; it fails, which nobody needs to know once the extent is released."""

    def __init__(self, done: list[str], offset: int) -> None:
        self._done = done
        self._offset = offset

    def wait(self) -> None:
        self._done.append(f"ended {self._offset}")
        raise RuntimeError("the disk is gone")

    def wait_source(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.wait()


def test_an_extent_is_released_after_its_last_write() -> None:
    """A graph dropped before backward: the next call's write must not meet the old one in the extent."""
    store = LateStore()
    storage = NvmeActivationStorage(cast(NvmeStore, store), CPU, MIB)
    storage.release(put(storage, filled(4096, 1)))
    assert store.done == ["began 0"]
    put(storage, filled(4096, 2))
    assert store.done == ["began 0", "ended 0", "released 0", "began 0"]


def test_nvme_storage_holds_no_memory(tmp_path: Path) -> None:
    """Neither what was written nor what was read into lives as long as its extent."""
    with NvmeStore([tmp_path]) as store:
        storage = NvmeActivationStorage(store, CPU, MIB)
        values, found = filled(4 * MIB, 7), filled(4 * MIB, 0xEE)
        weak = [StorageWeakRef(found.untyped_storage())]

        def fill(memory: torch.Tensor) -> None:
            weak.append(StorageWeakRef(memory.untyped_storage()))
            memory.copy_(values)

        extent = storage.put(values.nbytes, fill)
        assert weak[1].expired()
        storage.fetch(extent, found).wait()
        assert bool((found == 7).all())
        del found
        assert weak[0].expired()


def test_the_staging_memory_has_a_fixed_size(tmp_path: Path) -> None:
    """However many calls there are, and however large they are."""
    policy = ActivationCheckpointingConfig(tier="nvme", nvme_paths=(str(tmp_path),), buffer_bytes=3 * MIB)
    gc.collect()  # what other tests left must not go while this one measures
    held, before = set(), ops.host_buffer_bytes()
    for calls, rows in ((1, 16), (12, 16), (3, 40_000)):
        checkpointing = ActivationCheckpointing(policy)
        hidden = torch.ones(rows, WIDTH, requires_grad=True) * 1
        for _ in range(calls):
            hidden = checkpointing(torch.sin, hidden)
        assert checkpointing.used_bytes() == calls * rows * WIDTH * 4
        held.add((checkpointing.allocated_bytes()["host"], ops.host_buffer_bytes() - before))
        hidden.sum().backward()
        held.add((checkpointing.allocated_bytes()["host"], ops.host_buffer_bytes() - before))
        del checkpointing, hidden
        gc.collect()
    assert len(held) == 1 and 2 * MIB < max(held)[0] == max(held)[1] <= 3 * MIB


def holds(file: Path, values: bytes) -> bool:
    """Whether the first stripe of ``file`` has ``values``."""
    with file.open("rb") as opened:
        return values in opened.read(MIB)


def test_storage_that_fails(tmp_path: Path) -> None:
    """A path below a file is refused at the first call; what cannot be read is said in backward."""
    inputs = torch.randn(64, WIDTH, requires_grad=True)
    below = ActivationCheckpointingConfig(tier="nvme", nvme_paths=(f"{__file__}/below",))
    with pytest.raises(RuntimeError, match=f"{__file__}/below"):
        ActivationCheckpointing(below)(torch.sin, inputs * 1)
    checkpointing = ActivationCheckpointing(
        ActivationCheckpointingConfig(tier="nvme", nvme_paths=(str(tmp_path),))
    )
    out = checkpointing(torch.sin, inputs * 1)
    (file,) = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size >= MIB]
    written = inputs.detach().numpy().tobytes()
    deadline = time.monotonic() + 60
    while not holds(file, written):  # a write still under way would make the file longer again
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.truncate(file, 0)
    with pytest.raises(RuntimeError, match=str(file)):
        out.sum().backward()


def test_storage_is_removed_with_its_owner(tmp_path: Path) -> None:
    model, seed = Stack(2), fresh_seed()
    checkpointing = ActivationCheckpointing(
        ActivationCheckpointingConfig(tier="nvme", nvme_paths=(str(tmp_path),))
    )
    assert same(gradients(model, checkpointing, seed), gradients(model, None, seed))
    assert [path for path in tmp_path.rglob("*") if path.is_file()]
    del checkpointing
    gc.collect()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
