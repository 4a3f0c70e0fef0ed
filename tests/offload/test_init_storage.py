"""Shards that are allocated and freed one by one: their values, and reuse of their extents."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from zero_ext.config import AioConfig, OffloadConfig
from zero_ext.config.offload import Tier
from zero_ext.offload import InitStorage, NvmeStore, ShardStorage, tier_manager
from zero_ext.offload.shard_storage import NvmeShard

BLOCK = 1024  # fp32 elements of 4096 bytes


def storage_in(tier: Tier, folder: Path) -> InitStorage:
    paths = (str(folder),) if tier == "nvme" else ()
    return InitStorage(OffloadConfig(params=tier, nvme_paths=paths), AioConfig())


@pytest.mark.parametrize("tier", ["device", "host", "nvme"])
def test_shards_against_plain_tensors(tier: Tier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = torch.seed() & 0x7FFFFFFF
    print(f"seed {seed}")
    torch.manual_seed(seed)
    draw = random.Random(seed)
    monkeypatch.setattr(tier_manager, "_GROWTH_BYTES", 8 * 4096)
    storage = storage_in(tier, tmp_path)
    model: list[tuple[ShardStorage, torch.Tensor]] = []
    most = 0
    for _ in range(150):
        if model and draw.random() < 0.4:
            model.pop(draw.randrange(len(model)))
        else:
            shard = storage.allocate(draw.randint(1, 5) * BLOCK, torch.float32)
            values = torch.randn(shard.numel)
            shard.store(0, values, "device")
            model.append((shard, values))
        if model:
            shard, values = draw.choice(model)
            begin = draw.randrange(shard.numel)  # any element, in no block in particular
            some = torch.randn(draw.randint(1, shard.numel - begin))
            shard.store(begin, some, "device")
            values[begin : begin + len(some)] = some
            del shard
        most = max(most, sum(values.nbytes for _, values in model))
    for shard, values in model:
        first = draw.randrange(shard.numel // BLOCK) * BLOCK
        into = torch.full((shard.numel - first,), float("nan"))
        shard.fetch(into, first).wait()
        assert torch.equal(into, values[first:]) and torch.equal(shard.read(0, shard.numel), values)
    files = list(tmp_path.rglob("extents.bin"))
    assert len(files) == (tier == "nvme")
    assert all(path.stat().st_size <= 4 * most + 16 * 4096 for path in files)
    shard, _ = model[0]
    model.clear()
    if isinstance(shard, NvmeShard):
        assert files[0].exists()
        storage.close()
        assert not list(tmp_path.iterdir())
    del shard  # after its store


def test_files_are_removed_with_the_last_shard(tmp_path: Path) -> None:
    storage = storage_in("nvme", tmp_path)
    shards = [storage.allocate(BLOCK, torch.float32) for _ in range(2)]
    del storage
    assert len(list(tmp_path.iterdir())) == 1
    shards.pop()
    assert len(list(tmp_path.iterdir())) == 1
    shards.pop()
    assert not list(tmp_path.iterdir())


def test_an_extent_without_zeros_is_allocated_too(tmp_path: Path) -> None:
    with NvmeStore([tmp_path]) as store:
        store.reserve(1 << 20, zeros=False)
        (path,) = [device.path for device in store.facts().devices]
        assert path.stat().st_blocks * 512 >= 1 << 20
        assert store.facts().largest_free == 1 << 20
        store.allocate(4096)
        assert store.facts().largest_free == (1 << 20) - 4096
