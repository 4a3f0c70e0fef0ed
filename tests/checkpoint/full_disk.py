"""Run as a program: saves on a file system that fills up, on two ranks, and checks what is left.

Usage: python -m tests.checkpoint.full_disk FOLDER. A small tmpfs is mounted on FOLDER in a mount namespace
of this process alone; where mounting is not allowed, a limit on file sizes makes the kernel refuse writes.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from pathlib import Path

import torch

from tests.checkpoint.fake_source import FakeSource, dense
from tests.checkpoint.kill_loop import REFUSED, in_child, join
from zero_ext.checkpoint import CheckpointError, load_state, save_state

SMALL = {"w": dense(1000)}
LARGE = {"w": dense(400_000)}  # 4.8 MB of state
CAPACITY = 3 << 20
_NEW_MOUNTS, _NEW_USER, _PRIVATE = 0x20000, 0x10000000, (1 << 18) | (1 << 14)


def mount_small(folder: Path) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    flags = _NEW_MOUNTS if os.getuid() == 0 else _NEW_MOUNTS | _NEW_USER
    if libc.unshare(flags) or libc.mount(b"none", b"/", None, _PRIVATE, None):
        return False
    return libc.mount(b"tmpfs", bytes(folder), b"tmpfs", 0, f"size={CAPACITY}".encode()) == 0


def limit_file_size() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (CAPACITY // 2, CAPACITY // 2))


def save_large(folder: Path, store: Path, rank: int, mounted: bool) -> int:
    if not mounted:
        limit_file_size()
    group = join(store, rank, 2)
    try:
        save_state(folder, FakeSource(LARGE, 2, rank, 2, group))
    except CheckpointError as error:
        # One write a line: both ranks have the same pipe.
        os.write(sys.stdout.fileno(), f"rank {rank}: {error}\n".encode())
        return REFUSED
    return 0


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    mounted = mount_small(folder)
    print("tmpfs" if mounted else "file size limit")
    sys.stdout.flush()
    save_state(folder, FakeSource(SMALL, 1))
    before = {path.name for path in folder.iterdir()}
    store = folder.with_suffix(".store")
    children = [in_child(lambda rank=rank: save_large(folder, store, rank, mounted)) for rank in range(2)]  # type: ignore[misc]
    codes = sorted(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)
    if codes != [REFUSED, REFUSED]:
        raise AssertionError(f"exit codes {codes}")
    after = {path.name for path in folder.iterdir()}
    if after != before:
        raise AssertionError(f"left behind: {after - before}")
    source = FakeSource(SMALL, 99)
    load_state(folder, source)
    if not source.holds(1):
        raise AssertionError("the last checkpoint is not whole")


if __name__ == "__main__":
    main()
