"""Homes that come and go one by one: what they hold, and that their room is used again."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from zero_ext.config import AioPolicy, OffloadPolicy
from zero_ext.config.sections.offload import Tier
from zero_ext.offload import Birthplace, NvmeStore, ShardHome, init_storage
from zero_ext.offload.nvme.nvme_shard_storage import StoredHome

BLOCK = 1024  # fp32 elements of 4096 bytes


def place_in(tier: Tier, folder: Path) -> Birthplace:
    paths = (str(folder),) if tier == "nvme" else ()
    return Birthplace(OffloadPolicy(params=tier, nvme_paths=paths), AioPolicy())


@pytest.mark.parametrize("tier", ["device", "host", "nvme"])
def test_homes_against_plain_tensors(tier: Tier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = torch.seed() & 0x7FFFFFFF
    print(f"seed {seed}")
    torch.manual_seed(seed)
    draw = random.Random(seed)
    monkeypatch.setattr(init_storage, "_GROWTH_BYTES", 8 * 4096)
    place = place_in(tier, tmp_path)
    model: list[tuple[ShardHome, torch.Tensor]] = []
    most = 0
    for _ in range(150):
        if model and draw.random() < 0.4:
            model.pop(draw.randrange(len(model)))
        else:
            home = place.home(draw.randint(1, 5) * BLOCK, torch.float32)
            values = torch.randn(home.numel)
            home.store(0, values, "device")
            model.append((home, values))
        if model:
            home, values = draw.choice(model)
            begin = draw.randrange(home.numel)  # any element, in no block in particular
            some = torch.randn(draw.randint(1, home.numel - begin))
            home.store(begin, some, "device")
            values[begin : begin + len(some)] = some
            del home
        most = max(most, sum(values.nbytes for _, values in model))
    for home, values in model:
        first = draw.randrange(home.numel // BLOCK) * BLOCK
        into = torch.full((home.numel - first,), float("nan"))
        home.fetch(into, first).wait()
        assert torch.equal(into, values[first:]) and torch.equal(home.read(0, home.numel), values)
    files = list(tmp_path.rglob("extents.bin"))
    assert len(files) == (tier == "nvme")
    assert all(path.stat().st_size <= 4 * most + 16 * 4096 for path in files)
    home, _ = model[0]
    model.clear()
    if isinstance(home, StoredHome):
        assert files[0].exists()
        place.close()
        assert not list(tmp_path.iterdir())
    del home  # after its store


def test_files_go_with_the_last_home(tmp_path: Path) -> None:
    place = place_in("nvme", tmp_path)
    homes = [place.home(BLOCK, torch.float32) for _ in range(2)]
    del place
    assert len(list(tmp_path.iterdir())) == 1
    homes.pop()
    assert len(list(tmp_path.iterdir())) == 1
    homes.pop()
    assert not list(tmp_path.iterdir())


def test_room_without_zeros_is_allocated_all_the_same(tmp_path: Path) -> None:
    with NvmeStore([tmp_path]) as store:
        store.reserve(1 << 20, zeros=False)
        (path,) = [device.path for device in store.facts().devices]
        assert path.stat().st_blocks * 512 >= 1 << 20
        assert store.facts().largest_free == 1 << 20
        store.allocate(4096)
        assert store.facts().largest_free == (1 << 20) - 4096
