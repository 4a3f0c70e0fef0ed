"""What a process of the rank pool does: join the world, then run named functions until it is told to stop."""

from __future__ import annotations

import ctypes
import datetime
import faulthandler
import importlib
import io
import json
import os
import signal
import tempfile
import traceback
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from tests.accelerator.stand_in import enable, is_enabled
from tests.multi.garbage import collect_garbage

_GROUPS_PER_TASK = 1000
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of linux/prctl.h


class RankTask(NamedTuple):
    """One call: ``module:function`` and its keyword arguments, on the first ``world_size`` ranks.

    ``number`` counts the calls of the pool, from 1 on.
    """

    target: str
    arguments: dict[str, Any]
    world_size: int
    seed: int
    number: int


class World(NamedTuple):
    """What a test body knows about its ranks. ``seed`` is fresh for every call and the same on all ranks."""

    rank: int
    size: int
    group: dist.ProcessGroup
    seed: int

    def everyone(self, value: Any) -> list[Any]:
        """``value`` of every rank, in rank order."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def shared_folder(self) -> Path:
        """A new folder, the same on all ranks, which goes with their pool."""
        return Path(self.everyone(tempfile.mkdtemp() if self.rank == 0 else None)[0])

    def barrier(self) -> None:
        """Waits for all ranks."""
        dist.barrier(self.group)


def serve(
    rank: int, size: int, folder: str, connection: Connection, stand_in: bool, backend: str = "gloo"
) -> None:
    """Runs tasks from ``connection`` until it closes, or the pool's process has ended."""
    # Stopped, it would not see its pipe close. The server of forks, its parent, lives as long as somebody has
    # this end of a pipe.
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    forkserver._forkserver._forkserver_alive_fd = None  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    tempfile.tempdir = folder  # removed with the pool
    _share_gloos_thread()
    if stand_in:
        enable()
    with (Path(folder) / f"stacks-{rank}").open("w") as stacks:
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        dist.init_process_group(
            backend,
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=300),
        )
        groups = {count: dist.new_group(list(range(count))) for count in range(1, size + 1)}
        collect_garbage()
        connection.send_bytes(b"ready")
        while True:
            try:
                task = RankTask(**json.loads(connection.recv_bytes()))
            except EOFError:
                return
            # Torch names groups by a count of each process, and calls on fewer ranks advance it on those
            # alone. A group whose name was used before would find the earlier one's addresses in the store.
            _world.group_count = max(_world.group_count, _GROUPS_PER_TASK * task.number)
            buffer = io.BytesIO()
            answer = _answer(task, World(rank, task.world_size, groups[task.world_size], task.seed))
            torch.save(answer | {"groups": len(_world.pg_map)}, buffer)
            collect_garbage()
            connection.send_bytes(buffer.getvalue())  # after which this process is stopped


def _share_gloos_thread() -> None:
    """Have all groups of this process use one device of gloo.

    Torch makes one for each group and keeps it for the life of the process. Each has a thread that wakes a
    hundred times a second: together they were a tenth of all work of the tests.
    """
    device = dist.ProcessGroupGloo.create_default_device()
    make = dist.ProcessGroupGloo.__init__

    def make_on_device(
        group: dist.ProcessGroupGloo, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta
    ) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices, options._timeout = [device], timeout
        make(group, store, rank, size, options)

    dist.ProcessGroupGloo.__init__ = make_on_device  # type: ignore[method-assign]


def _answer(task: RankTask, world: World) -> dict[str, Any]:
    module, _, name = task.target.partition(":")
    torch.manual_seed(task.seed)
    if is_enabled():
        torch.stand_in.set_schedule("random", task.seed)  # type: ignore[attr-defined]
    try:
        function = getattr(importlib.import_module(module), name)
        return {"result": getattr(function, "on_one_rank", function)(world, **task.arguments)}
    except Exception:
        return {"error": traceback.format_exc()}
