"""Run as a program: kills a saving process at every change it makes to the disk, and checks what is left.

It forks instead of starting processes, so that torch is imported once; nothing else may run torch's threads
here. Usage: python -m tests.checkpoint.kill_loop FOLDER SCENARIO:WORLD_SIZE:VICTIM...
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.checkpoint.boundaries import CountingFilesystem, die_at
from tests.checkpoint.fake_source import FakeSource, dense
from zero_ext.checkpoint import CheckpointError, load_state, save_state, saving

TABLE = {"w": dense(25_000), "b": dense(17)}
OLD, NEW, NEXT = 1, 2, 3
SCENARIOS = {
    "first": {},
    "second": {},
    "replace": {"step": OLD},
    "keep": {"keep_last": 1},
    "background": {"async_save": True},
}
SAVED, REFUSED, BROKEN = 0, 7, 9


def use(filesystem: CountingFilesystem | None) -> None:
    saving.Filesystem = (lambda: filesystem) if filesystem is not None else CountingFilesystem.__base__  # type: ignore[misc, assignment]


def in_child(work: Callable[[], int]) -> int:
    child = os.fork()
    if child == 0:
        code = BROKEN
        try:
            code = work()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return child


def join(store: Path, rank: int, world_size: int) -> dist.ProcessGroup | None:
    if world_size == 1:
        return None
    timeout = timedelta(seconds=20)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timeout
    )
    return dist.group.WORLD


def save_new(
    folder: Path, scenario: str, rank: int, world_size: int, filesystem: CountingFilesystem | None
) -> int:
    group = join(folder.with_suffix(".store"), rank, world_size)
    use(filesystem)
    try:
        save_state(folder, FakeSource(TABLE, NEW, rank, world_size, group), **SCENARIOS[scenario]).wait()
    except CheckpointError as error:
        print(f"rank {rank} refused: {error}", file=sys.stderr)
        return REFUSED
    return SAVED


def check_complete(folder: Path, scenario: str) -> str:
    """What loads: the old state or the new one, never anything else."""
    source = FakeSource(TABLE, 99)
    source.poison()
    try:
        load_state(folder, source)
    except CheckpointError as error:
        if scenario == "first" and "holds no checkpoint" in str(error):
            return "none"
        raise
    if source.holds(OLD):
        return "old"
    if source.holds(NEW):
        return "new"
    raise AssertionError("a mixture was loaded")


def check_next(folder: Path) -> None:
    """The next save works and leaves nothing of the killed one behind."""
    save_state(folder, FakeSource(TABLE, NEXT))
    source = FakeSource(TABLE, 99)
    load_state(folder, source)
    if not source.holds(NEXT):
        raise AssertionError("the next save does not load")
    for path in folder.iterdir():
        if path.name not in (".lock", "latest", "step-000001", "step-000002", "step-000003"):
            raise AssertionError(f"left behind: {path.name}")


def attempt(folder: Path, scenario: str, world_size: int, victim: int, boundary: int, torn: bool) -> bool:
    """One killed save; False if the save has fewer changes than ``boundary`` and so was not killed."""
    if scenario != "first":
        save_state(folder, FakeSource(TABLE, OLD))
    children = {}
    begin = time.monotonic()
    for rank in range(world_size):
        filesystem = die_at(boundary, torn) if rank == victim else None
        children[in_child(lambda r=rank, s=filesystem: save_new(folder, scenario, r, world_size, s))] = rank  # type: ignore[misc]
    codes = {
        children[pid]: os.waitstatus_to_exitcode(status) for pid, status in (os.wait() for _ in children)
    }
    seconds = time.monotonic() - begin
    if BROKEN in codes.values() or seconds > 45:
        raise AssertionError(f"exit codes {codes} after {seconds:.1f} s")
    killed = codes[victim] == -signal.SIGKILL
    state = check_complete(folder, scenario)
    if not killed and (state, set(codes.values())) != ("new", {SAVED}):
        raise AssertionError(f"nobody was killed, yet {state} loads and the codes are {codes}")
    for rank, code in codes.items():
        # A survivor may only report success if the new checkpoint is there.
        if (
            killed
            and rank != victim
            and (code, state) not in ((REFUSED, "old"), (REFUSED, "none"), (REFUSED, "new"), (SAVED, "new"))
        ):
            raise AssertionError(f"rank {rank} ended with {code} while {state} loads")
    check_next(folder)
    return killed


def kill_everywhere(base: Path, scenario: str, world_size: int, victim: int) -> int:
    """Kills before every change, and in the middle of every write; how many kills there were."""
    kills = 0
    for torn in (False, True):
        boundary = 0
        while attempt(base / f"{torn}-{boundary}", scenario, world_size, victim, boundary, torn):
            kills += 1
            boundary += 1
    return kills


def main() -> None:
    torch.set_num_threads(1)
    for argument in sys.argv[2:]:
        scenario, world_size, victim = argument.split(":")
        base = Path(sys.argv[1]) / argument
        count = kill_everywhere(base, scenario, int(world_size), int(victim))
        print(f"{argument} {count}")


if __name__ == "__main__":
    main()
