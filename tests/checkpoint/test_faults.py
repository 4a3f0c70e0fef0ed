"""Whatever strikes a save: the last checkpoint stays whole, every rank hears of it, nothing stays behind."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.boundaries import CountingFilesystem, fail_at
from tests.checkpoint.fake_source import MIXED, SMALL, FakeSource, dense
from tests.multi.pool import RankPool
from tests.multi.rank import World
from zero_ext.checkpoint import CheckpointError, load_state, save_state, saving
from zero_ext.checkpoint.format.directory import CheckpointDirectory

MODULE = "tests.checkpoint.test_faults"
ROOT = Path(__file__).parents[2]


def run_program(*arguments: str, timeout: float = 240) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    """A folder in memory where there is such a file system: a kill needs no disk, which takes its time."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    "scenarios",
    [("first:1:0", "second:1:0", "replace:1:0", "keep:1:0", "background:1:0"), ("second:2:0", "second:2:1")],
)
def test_killed_at_every_change_to_the_disk(memory_folder: Path, scenarios: tuple[str, ...]) -> None:
    lines = run_program("-m", "tests.checkpoint.kill_loop", str(memory_folder), *scenarios).splitlines()
    kills = dict(line.rsplit(" ", 1) for line in lines)
    assert set(kills) == set(scenarios)
    # Five files and as many directory entries at least for rank 0, one shard file for another.
    assert all(int(count) >= (6 if scenario.endswith(":1") else 20) for scenario, count in kills.items())


def test_full_disk_on_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    output = run_program("-m", "tests.checkpoint.full_disk", str(tmp_path / "small"))
    reason = "No space left on device" if output.startswith("tmpfs") else "File too large"
    lines = output.splitlines()[1:]
    assert len(lines) == 2, output
    for line in lines:
        assert reason in line
        assert "No checkpoint was changed" in line


ERRORS = {
    # A full disk still renames and removes; a broken or read-only one does nothing any more.
    errno.ENOSPC: lambda name: name.split()[0] in ("make", "create", "write", "sync"),
    errno.EDQUOT: lambda name: name.split()[0] in ("make", "create", "write", "sync"),
    errno.EIO: lambda name: False,
    errno.EROFS: lambda name: True,
    errno.EACCES: lambda name: name.startswith("rename"),
}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: errno.errorcode[error])
@pytest.mark.parametrize("step", [2, 1], ids=["new", "replace"])
def test_an_error_at_every_change_to_the_disk(
    memory_folder: Path, monkeypatch: pytest.MonkeyPatch, error: int, step: int
) -> None:
    boundary, failed = 0, True
    while failed:
        folder = memory_folder / str(boundary)
        save_state(folder, FakeSource(SMALL, 1))
        filesystem = fail_at(boundary, error, ERRORS[error])
        monkeypatch.setattr(saving, "Filesystem", lambda filesystem=filesystem: filesystem)
        source = FakeSource(SMALL, 2)
        failed = False
        try:
            save_state(folder, source, step=step)
        except CheckpointError as raised:
            failed = True
            assert os.strerror(error) in str(raised)
            assert "rank 0" in str(raised)
        monkeypatch.undo()
        loaded = FakeSource(SMALL, 99)
        load_state(folder, loaded)
        # The commit may have happened before the error; a mixture may not.
        assert loaded.holds(1) or loaded.holds(2)
        assert failed or loaded.holds(2)
        if failed and error == errno.ENOSPC:
            assert not list(folder.glob(".saving-*"))
        save_state(folder, source, step=3)
        left = {path.name for path in folder.iterdir()}
        assert left <= {".lock", "latest", "step-000001", "step-000002", "step-000003"}
        boundary += 1
    assert boundary > 15


def test_everything_is_on_the_disk_before_it_becomes_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut cannot be played here, so the order of what reaches the disk is checked instead."""
    filesystem = CountingFilesystem(lambda number, name: None)
    monkeypatch.setattr(saving, "Filesystem", lambda: filesystem)
    save_state(tmp_path / "new", FakeSource(MIXED, 1))
    names = filesystem.names
    commit = names.index("rename .saving-step-000001 to step-000001")
    publish = names.index("rename .latest to latest")
    for file, visible in (
        ("rank-00000.safetensors", commit),
        ("manifest.json", commit),
        (".latest", publish),
    ):
        writes = [number for number, name in enumerate(names) if name == f"write {file}"]
        assert writes[-1] < names.index(f"sync {file}") < visible, names
    folder_syncs = [number for number, name in enumerate(names) if name == "sync .saving-step-000001"]
    assert (
        max(names.index("create manifest.json"), names.index("sync manifest.json"))
        < folder_syncs[-1]
        < commit
    )
    root_syncs = [number for number, name in enumerate(names) if name == "sync new"]
    assert any(commit < number < publish for number in root_syncs)
    assert any(publish < number for number in root_syncs)
    assert f"sync {tmp_path.name}" in names, "the new root's own entry"


def save_spoiled(world: World, directory: str, what: str, victim: int, background: bool) -> str:
    table = {"w": dense(10 + world.rank)} if what == "table" else MIXED
    source = FakeSource(table, 2, world.rank, world.size, world.group)
    if world.rank == victim and what == "shape":
        source.held["master", "embed.weight"] = source.held["master", "embed.weight"].reshape(1, -1)
    if world.rank == victim and what == "slice":
        del source.held["exp_avg", "embed.weight"]
    if what == "scalars":
        source.scalars["lr"] = world.rank
    try:
        save_state(directory, source, step=world.rank if what == "step" else 7, async_save=background).wait()
    except ValueError as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    ("what", "victim", "named"),
    [
        ("shape", 0, "rank 0: master of 'embed.weight'"),
        ("shape", 2, "rank 2: master of 'embed.weight'"),
        ("slice", 1, "exp_avg of 'embed.weight': elements"),
        ("table", 0, "parameter table"),
        ("scalars", 0, "scalar_state['lr']"),
        ("step", 0, "step: expected the same on all"),
    ],
)
def test_an_error_on_one_rank_and_ranks_that_disagree_are_refused_on_all(
    rank_pool: RankPool, tmp_path: Path, what: str, victim: int, named: str, background: bool
) -> None:
    arguments = {"directory": str(tmp_path), "what": what, "victim": victim, "background": background}
    answers = rank_pool.run(3, f"{MODULE}:save_spoiled", arguments)
    assert len(set(answers)) == 1 and named in answers[0], answers
    assert ("not stored" in answers[0]) == (what == "slice")
    assert {path.name for path in tmp_path.iterdir()} <= {".lock"}


@pytest.mark.parametrize(
    ("settings", "kind", "named"),
    [
        ({"step": -1}, ValueError, "step: expected .* got -1"),
        ({"step": 1.0}, ValueError, "step: expected .* got 1.0"),
        ({"step": True}, ValueError, "step: expected .* got True"),
        ({"step": 10**12}, ValueError, "step: expected .* got 1000000000000"),
        ({"keep_last": 0}, ValueError, "keep_last: expected .* got 0"),
        ({"keep_last": 1.5}, ValueError, "keep_last: expected .* got 1.5"),
        ({"client_state": {"a": [object()]}}, TypeError, r"client_state.a\[0\]: a builtins.object"),
        ({"extra": {"x": {1, 2}}}, TypeError, "extra.x: a builtins.set"),
        ({"extra": {"$float": 1}}, TypeError, r"extra: expected a dict .* got \['\$float'\]"),
        ({"extra": [1]}, TypeError, "extra: expected a dict .* got 'list'"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_written(
    tmp_path: Path, settings: dict[str, object], kind: type[Exception], named: str
) -> None:
    with pytest.raises(kind, match=named):
        save_state(tmp_path / "new", FakeSource(SMALL, 1), **settings)  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()


def test_a_state_that_holds_itself_is_refused(tmp_path: Path) -> None:
    state: list[object] = []
    state.append(state)
    with pytest.raises(ValueError, match="at most 100 nested levels"):
        save_state(tmp_path, FakeSource(SMALL, 1), client_state=state)


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"rank 0.*file"):
        save_state(tmp_path / "file" / "sub", FakeSource(SMALL, 1))


def test_a_second_saver_waits_and_then_raises(tmp_path: Path) -> None:
    save_state(tmp_path, FakeSource(SMALL, 1))
    source = FakeSource(SMALL, 2)
    source.config = type(source.config)(timeout_seconds=0.2)
    with CheckpointDirectory(tmp_path).locked(1.0):
        (tmp_path / ".saving-step-000002").mkdir()
        with pytest.raises(CheckpointError, match=r"another save has held this directory for 0\.1 s"):
            save_state(tmp_path, source)
        assert (tmp_path / ".saving-step-000002").is_dir(), "the other save's work was removed"
    begin = threading.Event()

    def hold() -> None:
        with CheckpointDirectory(tmp_path).locked(1.0):
            begin.set()
            time.sleep(0.3)

    holder = threading.Thread(target=hold)
    holder.start()
    begin.wait()
    start = time.monotonic()
    source.config = type(source.config)(timeout_seconds=20.0)
    save_state(tmp_path, source)
    assert time.monotonic() - start > 0.2
    holder.join()


def test_files_of_the_user_are_left_alone(tmp_path: Path) -> None:
    names = ["notes.txt", ".saving-notes", "step-12", "step-0000001", ".removed-x", ".replaced-mine"]
    for name in names:
        (tmp_path / name).mkdir()
    for step in (1, 2, 3):
        save_state(tmp_path, FakeSource(SMALL, 1), step=step, keep_last=1)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*names, ".lock", "latest", "step-000003"}
