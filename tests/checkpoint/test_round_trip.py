"""What is saved comes back, bit for bit, at any world size and however the ranks hold it."""

from __future__ import annotations

import collections
import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.checkpoint.fake_source import MIXED, SMALL, FakeSource, dense, random_state
from tests.multi.pool import RankPool
from tests.multi.rank import World
from zero_ext.checkpoint import load_state, save_state
from zero_ext.checkpoint.state_slices import CheckpointSlice, DeviceStaging

MODULE = "tests.checkpoint.test_round_trip"


def save_on_rank(world: World, directory: str, state: int, sharded: bool, background: bool) -> None:
    source = FakeSource(MIXED, state, world.rank, world.size, world.group, sharded)
    handle = save_state(directory, source, client_state={"rank": 0}, async_save=background)
    if background:
        source.poison()  # the staged copy must be what is written
    assert handle.wait() == Path(directory) / f"step-{state:06d}"
    assert handle.done()


def load_on_rank(world: World, directory: str, state: int, sharded: bool) -> int:
    source = FakeSource(MIXED, state + 1, world.rank, world.size, world.group, sharded)
    source.poison()
    loaded = load_state(directory, source)
    assert source.holds(state)
    assert source.finished == 1
    assert loaded.client_state == {"rank": 0}
    return loaded.step


def save(pool: RankPool, world_size: int, directory: Path, state: int, **settings: bool) -> None:
    arguments = {"directory": str(directory), "state": state, "sharded": True, "background": False}
    pool.run(world_size, f"{MODULE}:save_on_rank", arguments | settings)


def load(pool: RankPool, world_size: int, directory: Path, state: int, sharded: bool = True) -> list[int]:
    arguments = {"directory": str(directory), "state": state, "sharded": sharded}
    return pool.run(world_size, f"{MODULE}:load_on_rank", arguments)


WORLDS = [*itertools.product((1, 2, 4), (1, 2, 4)), (3, 2), (2, 3)]


@pytest.mark.by_turns()
@pytest.mark.parametrize(("saved_at", "loaded_at"), WORLDS)
def test_any_world_size_to_any_other(
    rank_pool: RankPool, tmp_path: Path, seed: int, saved_at: int, loaded_at: int
) -> None:
    background = saved_at == loaded_at  # whose files hold the state of the call, not what comes after it
    save(
        rank_pool, saved_at, tmp_path, seed, sharded=random.Random(seed).random() < 0.5, background=background
    )
    for sharded in (True, False):
        assert load(rank_pool, loaded_at, tmp_path, seed, sharded) == [seed] * loaded_at


def test_shards_are_safetensors_of_one_dimensional_slices(
    rank_pool: RankPool, tmp_path: Path, seed: int
) -> None:
    save(rank_pool, 2, tmp_path, seed)
    stored: dict[tuple[str, str], list[tuple[int, torch.Tensor]]] = collections.defaultdict(list)
    for path in sorted((tmp_path / f"step-{seed:06d}").glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118
                name, kind, start = key.rsplit(":", 2)
                stored[kind, name].append((int(start), file.get_tensor(key)))
    for key, full in random_state(MIXED, seed).items():
        values = [tensor for _, tensor in sorted(stored[key], key=lambda item: item[0])]
        assert all(value.dim() == 1 for value in values)
        assert torch.equal(torch.cat([full[:0], *values]), full), key


def test_tied_names_may_come_in_another_order(tmp_path: Path, seed: int) -> None:
    saved = {"embed.weight": dense(9, 4, aliases=("head.weight",))}
    loaded = {"head.weight": dense(9, 4, aliases=("embed.weight",))}
    save_state(tmp_path, FakeSource(saved, seed))
    source = FakeSource(loaded, seed)
    source.poison()
    load_state(tmp_path, source)
    for kind in ("master", "exp_avg"):
        assert torch.equal(source.held[kind, "head.weight"], random_state(saved, seed)[kind, "embed.weight"])


def test_named_states_come_back_as_they_were(tmp_path: Path, seed: int) -> None:
    state: dict[str, Any] = {
        "tuple": (1, (2, [3.5, None])),
        "counter": collections.Counter({10: 2, 20: 1}),
        "numbers": {1: "a", 2.5: "b", (3, 4): "c", None: "d"},
        "floats": [math.inf, -math.inf, 1e-310, 0.1 + 0.2],
        "dollar": {"$tuple": [1], "$": 2},
        "bytes": b"\0\xff",
        "flag": True,
        "big": 1 << 200,
        "random": random.Random(seed).getstate(),
        "torch": torch.get_rng_state(),
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
    }
    extra = {"scheduler": state, "none": None, "nan": math.nan}
    save_state(tmp_path, FakeSource(SMALL, seed), client_state=state, extra=extra)
    loaded = load_state(tmp_path, FakeSource(SMALL, seed))
    for found in (loaded.client_state, loaded.extra["scheduler"]):
        tensors = {key: found.pop(key) for key in ("torch", "scalar")}
        assert torch.equal(tensors["torch"], state["torch"])
        assert tensors["scalar"].dtype == torch.bfloat16
        assert tensors["scalar"].item() == 2.5
        rest = {key: value for key, value in state.items() if key not in tensors}
        assert found == rest
        assert repr(found) == repr(rest)  # equality alone would accept True for 1 and 1.0
    assert loaded.extra["none"] is None and math.isnan(loaded.extra["nan"])


class LazySource(FakeSource):
    """Makes its optimizer state only when told what the checkpoint holds, as late optimizers do."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.late = {key: self.held.pop(key) for key in list(self.held) if key[0] != "master"}

    def prepare_load(self, kinds: dict[str, tuple[str, ...]]) -> None:
        self.held |= {key: tensor for key, tensor in self.late.items() if key[0] in kinds[key[1]]}


def test_late_state_is_asked_for(tmp_path: Path, seed: int) -> None:
    save_state(tmp_path, FakeSource(MIXED, seed))
    source = LazySource(MIXED, seed + 1)
    load_state(tmp_path, source)
    assert source.holds(seed)


def test_a_step_can_be_chosen_and_replaced(tmp_path: Path) -> None:
    for step, state in ((1, 1), (2, 2), (1, 3)):
        save_state(tmp_path, FakeSource(SMALL, state), step=step)
    assert (tmp_path / "latest").read_text() == "step-000001\n"
    for step, state in ((1, 3), (2, 2), ("latest", 3), (None, 3)):
        source = FakeSource(SMALL, 99)
        load_state(tmp_path, source, step=step)  # type: ignore[arg-type]
        assert source.holds(state), step
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [".lock", "latest", "step-000001", "step-000002"]


def test_keep_last_removes_the_oldest_saves(tmp_path: Path) -> None:
    for step in (100, 200, 300, 150):
        save_state(tmp_path, FakeSource(SMALL, 1), step=step, keep_last=2)
    # 150 was saved last, 300 before it: age counts, not the number.
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000150", "step-000300"]
    save_state(tmp_path, FakeSource(SMALL, 1), step=1, keep_last=1)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-000001"]


def test_a_graph_that_saved_the_old_values_finds_out(tmp_path: Path) -> None:
    source = FakeSource(SMALL, 1)
    save_state(tmp_path, source)
    weight = source.held["master", "a.weight"]
    loss = (weight * torch.ones(weight.numel(), requires_grad=True)).sum()
    load_state(tmp_path, source)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_state_without_tensors(tmp_path: Path) -> None:
    class Empty(FakeSource):
        def buffers(self) -> dict[str, torch.Tensor]:
            return {}

    save_state(tmp_path, Empty({"nothing": dense(0)}, 5))
    source = Empty({"nothing": dense(0)}, 6)
    assert load_state(tmp_path, source).step == 5
    manifest = json.loads((tmp_path / "step-000005" / "manifest.json").read_text())
    assert manifest["slices"] == []


def test_only_needed_bytes_are_read(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of eight reads its eighth, give or take a chunk at each end."""
    from zero_ext.checkpoint import chunk_reader

    table = {"w": dense(8 << 20, kinds={"master": torch.float32})}
    save_state(tmp_path, FakeSource(table, seed))
    manifest, path = (
        tmp_path / f"step-{seed:06d}" / name for name in ("manifest.json", "rank-00000.safetensors")
    )
    assert path.stat().st_size > 32 << 20
    from zero_ext.checkpoint.format.manifest import read_manifest
    from zero_ext.checkpoint.load_plan import plan_fills

    item = FakeSource(table, seed, 3, 8).held["master", "w"].zero_()
    found, _ = read_manifest(manifest.parent)
    fills = plan_fills(found, [CheckpointSlice("master", "w", 3 << 20, item)])
    read = 0
    with chunk_reader.ChunkReader(chunk_reader.shard_paths(path.parent, found)) as reader:
        for chunk_read in reader.read([fill.read() for fill in fills]):
            read += chunk_read.data.numel()
            fills[chunk_read.request].write(chunk_read.data, DeviceStaging())
    assert torch.equal(item, random_state(table, seed)["master", "w"][3 << 20 : 4 << 20])
    assert read <= item.nbytes + 2 * (1 << 20)
