"""Run directories: private, kept apart by locks, removed at exit and after crashes, nothing else ever."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from zero_ext.offload.nvme import run_directory
from zero_ext.offload.nvme.run_directory import DATA_NAME, LOCK_NAME, RunDirectory, remove_abandoned

# The module by its path: importing the package would import torch, which takes long.
HOLDER = f"""
import importlib.util, sys, time
spec = importlib.util.spec_from_file_location("run_directory", {run_directory.__file__!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
directory = module.RunDirectory(sys.argv[1])
directory.data_path.write_bytes(b"state")
print(directory.path, flush=True)
"""


def holder(device_path: Path, then: str = "time.sleep(60)") -> subprocess.Popen[str]:
    """Another process with a run directory and a data file in it; its first line is the directory."""
    command = [sys.executable, "-c", HOLDER + then, str(device_path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def first_line(process: subprocess.Popen[str]) -> Path:
    assert process.stdout is not None
    return Path(process.stdout.readline().strip())


def abandoned(device_path: Path, name: str = "0123456789abcdef") -> Path:
    """What a crash leaves: a directory of our name with a lock that nobody holds."""
    folder = device_path / f"{run_directory._name_start()}7-{name}"
    folder.mkdir(mode=0o700)
    (folder / LOCK_NAME).touch(mode=0o600)
    (folder / DATA_NAME).write_bytes(b"left behind")
    return folder


def test_is_private_and_gone_when_closed(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert directory.path.parent == tmp_path
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    assert stat.S_IMODE((directory.path / LOCK_NAME).stat().st_mode) == 0o600
    assert not directory.data_path.exists()
    directory.data_path.write_bytes(b"state")
    directory.close()
    directory.close()
    assert list(tmp_path.iterdir()) == []


def test_is_gone_when_collected_even_from_another_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path.parent)
    directory = RunDirectory(tmp_path.name)
    monkeypatch.chdir("/")
    assert len(list(tmp_path.iterdir())) == 1
    del directory
    gc.collect()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("then", ["pass", "raise ValueError", "sys.exit(3)"])
def test_is_gone_after_the_process_ends(tmp_path: Path, then: str) -> None:
    process = holder(tmp_path, then)
    process.communicate(timeout=60)
    assert list(tmp_path.iterdir()) == []


def test_jobs_on_one_path_stay_apart_and_a_killed_one_is_cleaned_up(tmp_path: Path) -> None:
    process = holder(tmp_path)
    theirs = first_line(process)
    mine = RunDirectory(tmp_path)
    assert (theirs / DATA_NAME).read_bytes() == b"state" and mine.path != theirs
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert (theirs / DATA_NAME).exists()
    second = RunDirectory(tmp_path)
    assert not theirs.exists() and mine.path.exists()
    mine.close()
    second.close()
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_removes_nothing(tmp_path: Path) -> None:
    code = "import os\nif os.fork() == 0: sys.exit(0)\nos.wait()\nprint(directory.path.exists())"
    output, errors = holder(tmp_path, code).communicate(timeout=60)
    assert output.splitlines()[-1] == "True", errors
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    start = run_directory._name_start()
    good = f"{start}7-{'0' * 16}"
    other_host = good.replace("zero_ext-", "zero_ext-elsewhere.")
    names = [good + "0", good[:-1], good.replace("pid7", "pidx"), f"my-{good}", other_host, "data"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / LOCK_NAME).touch()
        (tmp_path / name / DATA_NAME).touch()
    (tmp_path / good).touch()  # a file of a directory's name
    before = sorted(path for path in tmp_path.rglob("*"))
    assert remove_abandoned(tmp_path) == []
    assert sorted(path for path in tmp_path.rglob("*")) == before


def test_foreign_files_in_an_abandoned_directory_stay(tmp_path: Path) -> None:
    folder = abandoned(tmp_path)
    (folder / "thesis.txt").write_text("precious")
    with pytest.warns(RuntimeWarning, match=rf"{folder.name}.*remove it by hand"):
        assert remove_abandoned(tmp_path) == []
    assert [path.name for path in folder.iterdir()] == ["thesis.txt"]


def symlinked_directory(folder: Path, outside: Path) -> None:
    folder.rename(outside / "moved")
    folder.symlink_to(outside / "moved")


def symlinked_lock(folder: Path, outside: Path) -> None:
    (folder / LOCK_NAME).rename(outside / "moved")
    (folder / LOCK_NAME).symlink_to(outside / "moved")


def fifo_lock(folder: Path, outside: Path) -> None:
    (folder / LOCK_NAME).unlink()
    os.mkfifo(folder / LOCK_NAME)


@pytest.mark.parametrize("trap", [symlinked_directory, symlinked_lock, fifo_lock])
def test_traps_are_left_alone(tmp_path: Path, trap: Callable[[Path, Path], None]) -> None:
    device, outside = tmp_path / "device", tmp_path / "outside"
    device.mkdir()
    outside.mkdir()
    trap(abandoned(device), outside)
    before = sorted(tmp_path.rglob("*"))
    assert remove_abandoned(device) == []
    assert sorted(tmp_path.rglob("*")) == before


def test_a_symlink_in_place_of_the_data_is_not_followed(tmp_path: Path) -> None:
    device, outside = tmp_path / "device", tmp_path / "precious"
    device.mkdir()
    outside.write_text("precious")
    folder = abandoned(device)
    (folder / DATA_NAME).unlink()
    (folder / DATA_NAME).symlink_to(outside)
    with pytest.warns(RuntimeWarning, match="remove it by hand"):
        remove_abandoned(device)
    assert outside.read_text() == "precious" and (folder / DATA_NAME).is_symlink()


def test_another_users_directory_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = abandoned(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert remove_abandoned(tmp_path) == []
    assert (folder / DATA_NAME).exists()


def test_an_interrupted_creation_and_removal_are_finished(tmp_path: Path) -> None:
    no_lock, no_data = abandoned(tmp_path, "a" * 16), abandoned(tmp_path, "b" * 16)
    (no_lock / DATA_NAME).unlink()
    (no_lock / LOCK_NAME).unlink()
    (no_data / DATA_NAME).unlink()
    assert sorted(remove_abandoned(tmp_path)) == sorted([no_lock.name, no_data.name])


@pytest.mark.filterwarnings("error")
def test_creation_survives_processes_that_remove(tmp_path: Path) -> None:
    """A directory whose lock is not held yet may be taken for abandoned; its creator then makes another."""
    stop = threading.Event()

    failures: list[BaseException] = []

    def sweep() -> None:
        try:
            while not stop.is_set():
                remove_abandoned(tmp_path)
        except BaseException as error:
            failures.append(error)

    sweepers = [threading.Thread(target=sweep) for _ in range(3)]
    for thread in sweepers:
        thread.start()
    try:
        for _ in range(200):
            directory = RunDirectory(tmp_path)
            assert (directory.path / LOCK_NAME).exists()
            directory.data_path.write_bytes(b"state")
            directory.close()
    finally:
        stop.set()
        for thread in sweepers:
            thread.join()
    assert failures == [] and list(tmp_path.iterdir()) == []


def test_a_directory_removed_before_its_lock_was_held_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try_lock, names = run_directory._try_lock, []

    def removed_first(descriptor: int) -> bool:
        names.append(sorted(path.name for path in tmp_path.iterdir()))
        if len(names) == 1:
            monkeypatch.setattr(run_directory, "_try_lock", try_lock)
            remove_abandoned(tmp_path)
            monkeypatch.setattr(run_directory, "_try_lock", removed_first)
        return try_lock(descriptor)

    monkeypatch.setattr(run_directory, "_try_lock", removed_first)
    directory = RunDirectory(tmp_path)
    assert len(names) == 2 and names[0] != names[1]
    assert [path.name for path in tmp_path.iterdir()] == [directory.path.name]
    directory.close()


def test_wrong_paths_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        RuntimeError, match=rf"{tmp_path}/absent': expected a directory, got .* does not exist"
    ):
        RunDirectory(tmp_path / "absent")
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(RuntimeError, match=f"{file}': expected a directory, got a file"):
        RunDirectory(file)


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """In a process that is not root, to whom every directory is writable."""
    tmp_path.chmod(0o555)
    for parent in [tmp_path, *tmp_path.parents]:
        if parent.stat().st_uid == os.getuid() and parent != Path("/") and parent != tmp_path:
            parent.chmod(parent.stat().st_mode | 0o011)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        text = "no error"
        try:
            if os.getuid() == 0:
                os.setuid(65534)
            RunDirectory(tmp_path)
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as file:
        text = file.read()
    tmp_path.chmod(0o755)
    assert text.startswith(f"RuntimeError: nvme path '{tmp_path}': no directory can be made"), text
    assert "Permission denied" in text


def test_a_file_system_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(RuntimeError, match=rf"{tmp_path}.*no locks \(flock\)"):
        RunDirectory(tmp_path)
    assert list(tmp_path.iterdir()) == []
