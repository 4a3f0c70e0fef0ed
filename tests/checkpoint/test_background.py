"""A background save: it blocks nobody, it is waited for, and its errors do not get lost."""

from __future__ import annotations

import errno
import gc
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.checkpoint.boundaries import CountingFilesystem, fail_at
from tests.checkpoint.fake_source import SMALL, FakeSource
from zero_ext import ops
from zero_ext.checkpoint import CheckpointError, SaveHandle, load_state, save_state, saving

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Holds every write until it is set."""
    event = threading.Event()
    filesystem = CountingFilesystem(lambda number, name: event.wait(30) or None)
    monkeypatch.setattr(saving, "Filesystem", lambda: filesystem)
    return event


def test_it_returns_before_anything_is_written(tmp_path: Path, gate: threading.Event) -> None:
    source = FakeSource(SMALL, 4)
    handle = save_state(tmp_path, source, async_save=True)
    assert not handle.done()
    with pytest.raises(TimeoutError, match="step-000004"):
        handle.wait(0.05)
    assert not list(tmp_path.glob("step-*"))
    source.poison()
    gate.set()
    assert handle.wait() == tmp_path / "step-000004"
    load_state(tmp_path, source)
    assert source.holds(4)


def test_the_next_save_and_load_wait_for_it(tmp_path: Path, gate: threading.Event) -> None:
    source = FakeSource(SMALL, 4)
    handle = save_state(tmp_path, source, step=1, async_save=True)
    threading.Timer(0.2, gate.set).start()
    save_state(tmp_path, source, step=2)
    assert handle.done()
    gate.clear()
    handle = save_state(tmp_path, source, step=3, async_save=True)
    threading.Timer(0.2, gate.set).start()
    assert load_state(tmp_path, source).step == 3
    assert handle.done()


def test_the_staged_copy_goes_when_the_save_has_ended(tmp_path: Path, gate: threading.Event) -> None:
    source = FakeSource(SMALL, 4)
    gc.collect()
    before = ops.host_buffer_bytes()
    handle = save_state(tmp_path, source, async_save=True)
    state = sum(tensor.nbytes for tensor in source.held.values())
    assert state <= ops.host_buffer_bytes() - before <= state + 64 * 20
    gate.set()
    handle.wait()
    deadline = time.monotonic() + 5
    while ops.host_buffer_bytes() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ops.host_buffer_bytes() == before


def fail_in_background(folder: Path, source: FakeSource, monkeypatch: pytest.MonkeyPatch) -> SaveHandle:
    monkeypatch.setattr(saving, "Filesystem", lambda: fail_at(5, errno.ENOSPC, lambda name: True))
    handle = save_state(folder, source, async_save=True)
    monkeypatch.undo()
    return handle


def test_an_error_comes_out_of_the_handle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = FakeSource(SMALL, 4)
    handle = fail_in_background(tmp_path, source, monkeypatch)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="No space left"):
            handle.wait()
    save_state(tmp_path, source)  # who has been told is not told again
    load_state(tmp_path, source)


@pytest.mark.parametrize("following", ["save", "load"])
def test_an_error_comes_out_of_what_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, following: str
) -> None:
    source = FakeSource(SMALL, 4)
    save_state(tmp_path, source, step=1)
    fail_in_background(tmp_path, source, monkeypatch)
    with pytest.raises(CheckpointError, match=r"previous save, step-000004: it failed.*No space left"):
        if following == "save":
            save_state(tmp_path, source, step=2)
        else:
            load_state(tmp_path, source)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000001"]
    save_state(tmp_path, source, step=2)


def test_an_error_nobody_asks_for_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    source = FakeSource(SMALL, 4)
    fail_in_background(tmp_path, source, monkeypatch)
    del source
    deadline, printed = time.monotonic() + 10, ""
    while "No space left" not in printed and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
        printed += capfd.readouterr().err
    assert "step-000004 was not saved, and nobody has waited for it" in printed


EXIT_PROGRAM = """
import atexit, errno, sys, time, weakref
groups = []  # registered first, this runs after what the package does at the exit
atexit.register(lambda: print("groups left:", sum(group() is not None for group in groups)))
import torch.distributed as dist
from tests.checkpoint.boundaries import CountingFilesystem, fail_at
from tests.checkpoint.fake_source import SMALL, FakeSource
from zero_ext.checkpoint import save_state, saving

folder, store, fail = sys.argv[1], sys.argv[2], sys.argv[5]
rank, world_size = int(sys.argv[3]), int(sys.argv[4])
slow = CountingFilesystem(lambda number, name: time.sleep(0.05))
full = fail_at(8, errno.ENOSPC, lambda name: not name.startswith("remove"))
saving.Filesystem = lambda: full if fail == "fail" else slow
group = None
if world_size > 1:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    group = dist.group.WORLD
source = FakeSource(SMALL, 6, rank, world_size, group)
handle = save_state(folder, source, async_save=True)
assert not handle.done()
if world_size > 1:
    groups.append(weakref.ref(saving.session_of(source).group_of(source)))
    dist.destroy_process_group()
print("the main thread ends")
"""


@pytest.mark.parametrize(("world_size", "fail"), [(2, "work"), (1, "fail")])
def test_the_process_ends_after_the_save(tmp_path: Path, world_size: int, fail: str) -> None:
    (tmp_path / "out").mkdir()
    program = [sys.executable, "-c", EXIT_PROGRAM, tmp_path / "out", tmp_path / "store"]
    processes = [
        subprocess.Popen(
            [*program, str(rank), str(world_size), fail],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        # A thread of gloo that is alive when the interpreter goes may end the process with an abort.
        assert out == "the main thread ends\ngroups left: 0\n"
        if fail == "fail":
            assert "step-000006 was not saved" in err
            assert "No space left" in err
    if fail == "work":
        source = FakeSource(SMALL, 99)
        load_state(tmp_path / "out", source)
        assert source.holds(6)
    else:
        assert not list((tmp_path / "out").glob("*step*"))
