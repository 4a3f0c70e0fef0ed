"""The memory of processes: what one holds, and caps on that of a child."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from zero_ext.monitor import MemoryCap, capped, resident_bytes
from zero_ext.monitor.process_memory import Cgroup, DataLimit, candidates

MIB = 2**20


def allocate_memory(cap: MemoryCap, nbytes: int) -> int:
    """Exit status of a process under `cap` that writes to `nbytes` of memory."""
    command = [sys.executable, "-c", f"b'x' * {nbytes}"]
    return subprocess.run(command, preexec_fn=cap.enter, stderr=subprocess.DEVNULL).returncode


def test_a_process_cannot_pass_its_cap() -> None:
    with capped(lambda watched: 128 * MIB) as strongest:
        for cap in (strongest, DataLimit(128 * MIB)):
            assert allocate_memory(cap, 16 * MIB) == 0 and cap.kills() in (0, None)
            assert allocate_memory(cap, 512 * MIB) == (-9 if isinstance(cap, Cgroup) else 1)
    if isinstance(strongest, Cgroup):
        assert not strongest.folder.exists()


def test_control_groups_are_made_below_the_own_one(tmp_path: Path) -> None:
    version_1 = "9:name=systemd:/\n4:cpu,memory:/job/7\n0::/\n"
    assert list(candidates(version_1, tmp_path)) == [
        (tmp_path / "memory" / "job" / "7", 1),
        (tmp_path, 2),
    ]
    assert list(candidates("0::/user/app\n", tmp_path)) == [
        (tmp_path / "user" / "app", 2),
        (tmp_path / "user", 2),
    ]


@pytest.mark.parametrize("version", [1, 2])
def test_a_folder_that_is_no_control_group_is_refused(tmp_path: Path, version: int) -> None:
    with pytest.raises(OSError):
        Cgroup(tmp_path / "group", MIB, version)
    assert not list(tmp_path.iterdir())


def test_resident_bytes_sees_what_is_touched() -> None:
    gc.collect()  # or what earlier tests left goes meanwhile
    before = resident_bytes()
    block = torch.ones(256 * 2**20, dtype=torch.uint8)
    assert 236 * 2**20 < resident_bytes() - before < 276 * 2**20
    assert block.sum() == block.numel()
