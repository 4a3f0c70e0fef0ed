"""Ranks that are interrupted, or that ask for different things: an error on all, and the next save works."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.fake_source import SMALL, FakeSource
from tests.multi.pool import RankPool
from tests.multi.rank import World
from zero_ext.checkpoint import CheckpointError, load_state, save_state
from zero_ext.checkpoint.rank_consensus import RankConsensus
from zero_ext.checkpoint.saving import UNTOUCHED, SaveJob
from zero_ext.config.training import TagValidation

MODULE = "tests.checkpoint.test_rank_consensus"


def outcome(source: FakeSource, directory: str) -> str:
    try:
        save_state(directory, source)
    except KeyboardInterrupt:
        return "interrupted"
    except CheckpointError as error:
        return str(error)
    return "saved"


# Where a rank is interrupted: which one, and in what.
POINTS: dict[str, tuple[int, Any, str]] = {
    "preparing": (1, import_module("zero_ext.checkpoint.saving"), "_describe"),
    "opening": (0, SaveJob, "_open"),
    "writing": (1, SaveJob, "_write"),
    "committing": (0, SaveJob, "_commit"),
    "exchange": (1, RankConsensus, "_all_gather"),
}


def interrupt(world: World, directory: str, where: str) -> list[Any]:
    """What this rank saw of a save during which one is interrupted, and of two saves after it."""
    source = FakeSource(SMALL, 3, world.rank, world.size, world.group)
    start = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        odd, owner, name = POINTS[where]
        if world.rank == odd:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            original = getattr(owner, name)

            def struck(*arguments: Any) -> Any:
                if where == "exchange":
                    # Before and after: the signal comes while the ranks exchange.
                    signal.raise_signal(signal.SIGINT)  # to this thread, at once
                    return original(*arguments)
                raise KeyboardInterrupt

            patch.setattr(owner, name, struck)
        first = outcome(source, directory)
    seconds = time.monotonic() - start
    return [first, seconds < 15, outcome(source, directory), outcome(source, directory)]


@pytest.mark.parametrize("where", POINTS)
def test_an_interrupt_on_one_rank_ends_the_save_on_all(
    rank_pool: RankPool, tmp_path: Path, where: str
) -> None:
    answers = rank_pool.run(3, f"{MODULE}:interrupt", {"directory": str(tmp_path), "where": where})
    for rank, (first, quick, *later) in enumerate(answers):
        assert quick and later == ["saved", "saved"]
        odd = POINTS[where][0]
        if rank == odd:
            assert first == "interrupted"
        else:
            assert f"failed: rank {odd}: KeyboardInterrupt" in first
            outcome_of_it = "The latest checkpoint is complete" if where == "committing" else UNTOUCHED
            assert outcome_of_it in first
    source = FakeSource(SMALL, 4)
    load_state(tmp_path, source)
    assert source.holds(3)
    assert not list(tmp_path.glob(".saving-*"))


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises, also where a shell in the background has the tests ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_in_the_last_exchange_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, last = 0, 0
    original = RankConsensus._all_gather

    def struck(self: RankConsensus, data: bytes) -> list[bytes]:
        nonlocal calls
        calls += 1
        if calls == last:
            signal.raise_signal(signal.SIGINT)  # to this thread, at once
        return original(self, data)

    monkeypatch.setattr(RankConsensus, "_all_gather", struck)
    save_state(tmp_path / "undisturbed", FakeSource(SMALL, 3))
    calls, last = 0, calls
    with pytest.raises(KeyboardInterrupt):
        save_state(tmp_path, FakeSource(SMALL, 3))
    assert calls == last > 0
    source = FakeSource(SMALL, 4)
    load_state(tmp_path, source)
    assert source.holds(3)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def load_own_step(world: World, directory: str, steps: list[Any]) -> str:
    source = FakeSource(SMALL, 1, world.rank, world.size, world.group)
    for seed in (1, 2):
        source.scalars["steps"] = seed
        save_state(directory, source)
    try:
        loaded = load_state(directory, source, step=steps[world.rank])
    except ValueError as error:
        return str(error)
    return f"step {loaded.step}"


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([1, 2], "step: expected the same on all ranks, got 1 on rank 0 and 2 on rank 1"),
        ([1, "latest"], "step: expected the same on all ranks, got 1 on rank 0 and latest on rank 1"),
        ([None, 2], "step: expected the same on all ranks, got latest on rank 0 and 2 on rank 1"),
        ([None, "latest"], "step 2"),
        ([1, 1], "step 1"),
    ],
)
def test_ranks_load_the_same_step(
    rank_pool: RankPool, tmp_path: Path, steps: list[Any], expected: str
) -> None:
    answers = rank_pool.run(2, f"{MODULE}:load_own_step", {"directory": str(tmp_path), "steps": steps})
    assert all(expected in answer for answer in answers), answers


def save_to_own(world: World, directories: list[str], hidden: bool, **settings: TagValidation) -> list[str]:
    """Where this rank has saved to, or its error, and all warnings."""
    source = FakeSource(SMALL, 3, world.rank, world.size, world.group)
    with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        if hidden and world.rank == 1:
            patch.setattr(Path, "is_dir", lambda path: False)
        try:
            found = str(save_state(directories[world.rank], source, **settings).path)
        except (CheckpointError, ValueError) as error:
            found = str(error)
    return [found, *(str(each.message) for each in caught if each.category is RuntimeWarning)]


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("validation", ["warn", "ignore", "fail"])
def test_the_directory_of_rank_0_counts(
    rank_pool: RankPool, tmp_path: Path, hidden: bool, validation: TagValidation
) -> None:
    directories = [str(tmp_path / name) for name in ("first", "second")]
    arguments = {"directories": directories, "hidden": hidden, "tag_validation": validation}
    (zeroth,), (first, *warned) = rank_pool.run(2, f"{MODULE}:save_to_own", arguments)
    differ = f"got '{directories[0]}' on rank 0 and '{directories[1]}' on rank 1"
    assert [differ in text for text in warned] == [True] * (validation == "warn")
    assert not Path(directories[1]).exists()
    if validation == "fail":
        assert differ in first and "rank 1" in zeroth and not any(tmp_path.glob("*/step-*"))
    elif hidden:  # as on another host, whose file system is its own
        seen = f"rank 1: {directories[0]}: expected a folder on a file system that all ranks share"
        assert seen in zeroth and seen in first
    else:
        assert zeroth == first == f"{directories[0]}/step-000003"
        source = FakeSource(SMALL, 4)
        load_state(directories[0], source)
        assert source.holds(3)


def test_a_lock_that_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    folder, outside = tmp_path / "run", tmp_path / "outside"
    folder.mkdir()
    lock = folder / ".lock"
    lock.symlink_to(outside)
    with pytest.raises(CheckpointError, match=r"\.lock: expected a regular file, got a symbolic link"):
        save_state(folder, FakeSource(SMALL, 1))
    assert not outside.exists()
    lock.unlink()
    for make in (os.mkfifo, os.mkdir):
        make(lock)
        with pytest.raises(CheckpointError, match=r"\.lock: expected a regular file, got something else"):
            save_state(folder, FakeSource(SMALL, 1))
        lock.rmdir() if lock.is_dir() else lock.unlink()
    save_state(folder, FakeSource(SMALL, 1))
