"""State outside memory: streamed to files and back, the same bytes as from memory, a few chunks at a time."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.fake_source import MIXED, SMALL, FakeSource, TensorSlice, dense, random_state
from tests.checkpoint.mutations import flip
from tests.checkpoint.stored_source import FakeStore, Meter, StoredSource
from tests.multi.pool import RankPool
from tests.multi.rank import World
from zero_ext.checkpoint import CheckpointError, StoredValues, load_state, save_state
from zero_ext.checkpoint.format.manifest import CHUNK_BYTES

MODULE = "tests.checkpoint.test_stored_values"
ROOT = Path(__file__).parents[2]
LARGE = {
    "w": dense(5 * CHUNK_BYTES // 4 + 77, kinds={"master": torch.float32, "exp_avg": torch.bfloat16}),
    "b": dense(7, kinds={"master": torch.float32}),
}


def in_store(kind: str, name: str) -> bool:
    return kind != "master" or name == "embed.weight"


def source_on(world: World, state: int, where: str, **settings: Any) -> FakeSource:
    arguments = (MIXED, state, world.rank, world.size, world.group)
    if where == "memory":
        return FakeSource(*arguments, **settings)
    if where == "both":
        settings["stored"] = in_store
    return StoredSource(*arguments, **settings)


def save_on_rank(world: World, directory: str, state: int, where: str) -> None:
    save_state(directory, source_on(world, state, where))


def load_on_rank(world: World, directory: str, state: int, where: str, sharded: bool) -> None:
    source = source_on(world, state + 1, where, sharded=sharded)
    source.poison()
    load_state(directory, source)
    assert source.holds(state)
    assert source.finished == 1
    if isinstance(source, StoredSource):
        assert source.meter.writes > 0
        assert source.meter.reads == 0


@pytest.mark.parametrize(("saved_at", "loaded_at"), [(1, 3), (3, 2), (4, 1)])
def test_any_world_size_to_any_other(
    rank_pool: RankPool, tmp_path: Path, seed: int, saved_at: int, loaded_at: int
) -> None:
    for where in ("memory", "store", "both"):
        arguments: dict[str, Any] = {"directory": str(tmp_path / where), "state": seed, "where": where}
        rank_pool.run(saved_at, f"{MODULE}:save_on_rank", arguments)
    for saved in ("store", "both"):
        for file in (tmp_path / "memory" / f"step-{seed:06d}").iterdir():
            assert (tmp_path / saved / file.parent.name / file.name).read_bytes() == file.read_bytes()
    for saved, loaded in (("memory", "store"), ("memory", "both"), ("store", "memory"), ("store", "store")):
        for sharded in (True, False):
            arguments = {"directory": str(tmp_path / saved), "state": seed, "where": loaded}
            rank_pool.run(loaded_at, f"{MODULE}:load_on_rank", arguments | {"sharded": sharded})


def test_a_few_chunks_are_alive(tmp_path: Path, seed: int) -> None:
    source = StoredSource(LARGE, seed)
    save_state(tmp_path, source)
    # The source yields two runs of each tensor, a third and the rest of it.
    tensors = [record.tensor for record in source.save_slices()]
    sizes = [record.numel * record.dtype.itemsize for record in tensors if isinstance(record, StoredValues)]
    assert len(sizes) == len(tensors) == 6
    assert source.meter.reads == sum(-(-size // CHUNK_BYTES) for size in sizes)
    assert source.meter.alive == 0
    assert source.meter.peak <= 2 * CHUNK_BYTES
    source.poison()
    load_state(tmp_path, source)
    assert source.holds(seed)
    assert source.meter.largest_write <= CHUNK_BYTES


MEMORY_PROGRAM = """
import re, sys, torch
from pathlib import Path
from tests.checkpoint.fake_source import dense
from tests.checkpoint.mutations import flip
from tests.checkpoint.stored_source import FileSource, FileValues
from zero_ext.checkpoint import load_state, save_state
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
def round_trip(numel, folder):
    table = {"w": dense(numel, kinds={"master": torch.float32})}
    first, second = (FileValues(f"{folder}-{name}", numel) for name in ("first", "second"))
    parts = [(begin, min(begin + (1 << 18), numel)) for begin in range(0, numel, 1 << 18)]
    for begin, end in parts:
        first.write(begin, torch.arange(begin, end).float())
    save_state(folder, FileSource(table, first))
    load_state(folder, FileSource(table, second))
    assert all(torch.equal(second.read(*part), torch.arange(*part).float()) for part in parts)
round_trip(1 << 10, sys.argv[1] + "/small")
Path("/proc/self/clear_refs").write_text("5")
before = peak()
round_trip(24 << 20, sys.argv[1] + "/large")
print((peak() - before) * 1024)
"""


def test_memory_stays_flat(tmp_path: Path) -> None:
    """96 MiB of state; a first, small round trip pays for what stays."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_PROGRAM, tmp_path],
        cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 48 << 20


@pytest.mark.parametrize("kind", [FakeSource, StoredSource])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_precision_converts_at_load(
    tmp_path: Path, seed: int, kind: type[FakeSource], dtype: torch.dtype
) -> None:
    save_state(tmp_path, kind(LARGE, seed))
    table = {name: replace(entry, kinds=dict.fromkeys(entry.kinds, dtype)) for name, entry in LARGE.items()}
    source = kind(table, seed)
    source.poison()
    load_state(tmp_path, source)
    for key, full in random_state(LARGE, seed).items():
        assert torch.equal(source.held[key], full.to(dtype)), key


def test_every_element_is_written_once(rank_pool: RankPool, tmp_path: Path, seed: int) -> None:
    """Of runs whose ends lie anywhere in chunks and blocks, nothing is lost and nothing written twice."""
    arguments = {"directory": str(tmp_path), "state": seed, "where": "store"}
    rank_pool.run(3, f"{MODULE}:save_on_rank", arguments)
    source = StoredSource(MIXED, seed + 1)
    source.poison()
    load_state(tmp_path, source)
    assert source.holds(seed)
    for tensor in source.held.values():
        ranges = sorted(source.meter.written.get(tensor.data_ptr(), []))
        ends = [0, *(end for _, end in ranges)]
        assert [begin for begin, _ in ranges] == ends[:-1]
        assert ends[-1] == tensor.numel()


def failing(action: str, number: int, run: Any) -> tuple[StoredSource, bool]:
    """A source whose read or write of that number fails in ``run``, and whether it has failed."""
    meter = Meter(**{f"failing_{action}": number})
    source = StoredSource(SMALL, 2, meter=meter)
    try:
        run(source)
    except CheckpointError as error:
        text = str(error)
        assert f"of its store failed: RuntimeError: {action} of number {number}: Input/output" in text
        doing = {"read": "reading elements 0 to", "write": "writing elements"}[action]
        assert any(f"{kind} of {name!r}: {doing}" in text for kind, name in source.held)
        half = (
            "No checkpoint was changed" if action == "read" else "mixture of its old state and the checkpoint"
        )
        assert "rank 0:" in text and half in text
        return source, True
    return source, False


def test_a_read_that_fails_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    save_state(tmp_path, StoredSource(SMALL, 1))
    for number in itertools.count():
        source, failed = failing("read", number, lambda source: save_state(tmp_path, source))
        if not failed:
            break
        assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "latest", "step-000001"]
    assert number == source.meter.reads > 3
    load_state(tmp_path, source, step=1)
    assert source.holds(1)


def test_a_write_that_fails_says_half_loaded(tmp_path: Path) -> None:
    save_state(tmp_path, FakeSource(SMALL, 1))
    for number in itertools.count():
        source, failed = failing("write", number, lambda source: load_state(tmp_path, source))
        if not failed:
            break
        assert source.finished == 0
    assert number == source.meter.writes > 3
    assert source.holds(1)


def fail_on_one_rank(world: World, directory: str, saving: bool) -> str:
    meter = Meter(failing_read=2, failing_write=2) if world.rank == 1 else None
    source = source_on(world, 2, "store", meter=meter)
    try:
        if saving:
            save_state(directory, source)
        else:
            load_state(directory, source)
    except CheckpointError as error:
        return str(error)
    return "done"


@pytest.mark.parametrize("saving", [True, False])
def test_an_error_on_one_rank_reaches_all(rank_pool: RankPool, tmp_path: Path, saving: bool) -> None:
    if not saving:
        save_state(tmp_path, FakeSource(MIXED, 1))
    arguments = {"directory": str(tmp_path), "saving": saving}
    answers = rank_pool.run(2, f"{MODULE}:fail_on_one_rank", arguments)
    assert len(set(answers)) == 1
    assert "rank 1: " in answers[0]
    assert "of number 2: Input/output error" in answers[0]
    assert "rank 0:" not in answers[0]


def test_nothing_is_written_before_everything_is_verified(tmp_path: Path) -> None:
    save_state(tmp_path, FakeSource(LARGE, 1))
    flip(tmp_path / "step-000001" / "rank-00000.safetensors", -1)
    source = StoredSource(LARGE, 2)
    with pytest.raises(CheckpointError, match=r"damaged: .*Nothing of the model was changed"):
        load_state(tmp_path, source)
    assert source.meter.writes == 0
    assert source.holds(2)


def save_in_background(world: World, directory: str, state: int) -> list[Any]:
    source = source_on(world, state, "both" if world.rank == 1 else "memory")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        handle = save_state(directory, source, async_save=True)
    done = handle.done()
    source.poison()  # what training does to the state must not reach the file
    handle.wait()
    return [done, [str(warning.message) for warning in caught]]


def test_a_background_save_has_ended_when_it_returns(rank_pool: RankPool, tmp_path: Path, seed: int) -> None:
    """On all ranks, though the state of one alone is in a store."""
    arguments = {"directory": str(tmp_path), "state": seed}
    answers = rank_pool.run(2, f"{MODULE}:save_in_background", arguments)
    assert [done for done, _ in answers] == [True, True]
    assert len(answers[0][1]) == 1
    assert "written before the call returned" in answers[0][1][0]
    assert answers[1][1] == []
    source = FakeSource(MIXED, seed + 1)
    load_state(tmp_path, source)
    assert source.holds(seed)


class Strange:
    """Stored values with something wrong."""

    def __init__(self, **changes: Any) -> None:
        self.numel, self.dtype, self.found = 13, torch.float32, torch.zeros(13)
        self.__dict__.update(changes)

    def read(self, begin: int, end: int) -> torch.Tensor:
        return self.found

    def write(self, begin: int, values: torch.Tensor) -> None:
        raise AssertionError("a refused load wrote")


STRANGE: dict[str, tuple[Any, type[Exception], str]] = {
    "other object": (object(), TypeError, "expected a tensor or StoredValues, got object"),
    "a tensor's numel": (Strange(numel=lambda: 13), ValueError, "numel of its store: .* got <function"),
    "numel below zero": (Strange(numel=-1), ValueError, "numel of its store: .* got -1"),
    "numel of truth": (Strange(numel=True), ValueError, "numel of its store: .* got True"),
    "dtype by name": (Strange(dtype="float32"), TypeError, "dtype of its store: .* got 'float32'"),
}
STRANGE_TO_SAVE = STRANGE | {
    "no such dtype": (Strange(dtype=torch.complex64), ValueError, "got torch.complex64"),
    "short answer": (Strange(found=torch.zeros(12)), CheckpointError, r"got \(12,\) of torch.float32"),
    "other answer": (Strange(found=torch.zeros(13).double()), CheckpointError, "of torch.float64"),
    "other shape": (Strange(found=torch.zeros(1, 13)), CheckpointError, r"got \(1, 13\)"),
    "other size": (Strange(numel=12, found=torch.zeros(12)), ValueError, "b.bias"),
}
STRANGE_TO_LOAD = STRANGE | {
    "too large": (Strange(numel=14), ValueError, "expected elements 0 to 14, got only the first 13"),
    "too small": (Strange(numel=12), ValueError, "the model asks for only its first 12 elements"),
    "other dtype": (Strange(dtype=torch.int32), ValueError, "expected torch.int32, got torch.bfloat16"),
}


class StrangeSource(FakeSource):
    """Its "b.bias" is ``values``."""

    values: Any
    start: Any = 0

    def save_slices(self) -> Any:
        yield from (record for record in super().save_slices() if record.name != "b.bias")
        yield TensorSlice("master", "b.bias", self.start, self.values)

    def load_slices(self) -> Any:
        return self.save_slices()


@pytest.mark.parametrize("case", STRANGE_TO_SAVE)
def test_strange_stores_are_not_saved(tmp_path: Path, case: str) -> None:
    source = StrangeSource(SMALL, 1)
    source.values, kind, named = STRANGE_TO_SAVE[case]
    with pytest.raises(kind, match=rf"master of 'b.bias'.*{named}|b\.bias.*not stored"):
        save_state(tmp_path, source)
    assert not list(tmp_path.glob("step-*"))


@pytest.mark.parametrize("case", STRANGE_TO_LOAD)
def test_strange_stores_are_not_loaded(tmp_path: Path, case: str) -> None:
    save_state(tmp_path, FakeSource(SMALL, 1))
    source = StrangeSource(SMALL, 2)
    source.values, kind, named = STRANGE_TO_LOAD[case]
    with pytest.raises(kind, match=rf"master of 'b.bias'.*{named}"):
        load_state(tmp_path, source)
    assert source.held["master", "a.weight"].equal(FakeSource(SMALL, 2).held["master", "a.weight"])


@pytest.mark.parametrize("start", [-1, 1.0, None])
def test_a_strange_start_is_named(tmp_path: Path, start: Any) -> None:
    source = StrangeSource(SMALL, 1)
    source.values, source.start = FakeStore(torch.zeros(13), Meter()), start
    with pytest.raises(ValueError, match=rf"master of 'b.bias': start: expected .* got {start}"):
        save_state(tmp_path, source)


def test_a_store_without_elements_is_not_saved(tmp_path: Path) -> None:
    source = StoredSource({"nothing": dense(0)}, 5)
    save_state(tmp_path, source)
    manifest = json.loads((tmp_path / "step-000005" / "manifest.json").read_text())
    assert {record["kind"] for record in manifest["slices"]} == {"buffer"}
    load_state(tmp_path, source)
    assert (source.meter.reads, source.meter.writes) == (0, 0)
