"""Transport between the ranks of one host without a socket: one copy from process to process."""

from __future__ import annotations

import contextlib
import os
import re
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from zero_ext import ops
from zero_ext.comm.flight_recorder import UnexpectedPayloadError
from zero_ext.comm.transport import PeerPayload, PointToPointTransport, ProcessGroupTransport, Waitable
from zero_ext.config.internal_error import zero_ext_bug

_UNEXPECTED = (" bytes where ", " sent something else in its place")  # of ops.cross_process_wait, too
_MEMORY_FOLDER = Path("/dev/shm")  # where the C library keeps shared memory that has a name
_NAME_START = "/zero_ext-"
_OWN_NAME = re.compile(r"zero_ext-([1-9]\d{0,8})-[0-9a-f]{1,16}")
_YOUNGEST_SECONDS = 60.0


class CrossProcessTransport(PointToPointTransport):
    """Sends and receives through ``ops.cross_process_*``, agreed on over ``group``."""

    def __init__(self, handle: int, group: ProcessGroupTransport, timeout_seconds: float) -> None:
        super().__init__(group.rank, group.world_size)
        self._handle = handle
        self._group = group  # Closing it now could cut off the last payload to a slower rank.
        self._timeout_seconds = timeout_seconds
        # Payloads of one peer and direction complete in order, so a number identifies each of them.
        self._started: Counter[tuple[int, bool]] = Counter()
        # Also at interpreter exit: the thread behind the handle must have ended by then.
        weakref.finalize(self, ops.cross_process_close, handle)

    def start(
        self, sends: Sequence[PeerPayload], receives: Sequence[PeerPayload], tag: int = 0
    ) -> Sequence[Waitable]:
        """Start the sends and then the receives. None of them blocks."""
        for rank, tensor in sends:
            ops.cross_process_send(self._handle, rank, tensor, tag)
        for rank, tensor in receives:
            ops.cross_process_receive(self._handle, rank, tensor, tag)
        return [self._transfer(rank, True) for rank, _ in receives] + [
            self._transfer(rank, False) for rank, _ in sends
        ]

    def abort(self, reason: str) -> None:
        """Abort this rank. Peers raise ``reason`` itself."""
        ops.cross_process_abort(self._handle, reason)

    def _transfer(self, rank: int, receiving: bool) -> Waitable:
        self._started[rank, receiving] += 1
        count = self._started[rank, receiving]
        return _Transfer((self._handle, rank, count, receiving), self._timeout_seconds)


class _Transfer:
    def __init__(self, payload: tuple[int, int, int, bool], timeout_seconds: float) -> None:
        self._payload = payload
        self._timeout_seconds = timeout_seconds

    def wait(self) -> None:
        """Block until this payload and those before it in its direction are complete."""
        try:
            ops.cross_process_wait(*self._payload, self._timeout_seconds)
        except RuntimeError as error:
            if any(text in str(error) for text in _UNEXPECTED):
                raise UnexpectedPayloadError(str(error)) from None
            raise


def fastest_host_transport(group: dist.ProcessGroup, timeout_seconds: float) -> PointToPointTransport:
    """Return the fastest transport for host tensors; a collective call, all ranks choose alike.

    It is a :class:`CrossProcessTransport` if all ranks of ``group`` share a host and may read each other's
    memory (the kernel's ptrace rules), else a :class:`ProcessGroupTransport`.

    The shared memory has a name only while ranks join. Whatever ends one of them meanwhile, the others remove
    the name. Where all of them are killed, the next start of this user does.
    """
    through_group = ProcessGroupTransport(group)
    rank, world_size = through_group.rank, through_group.world_size
    # The process in the name is rank 0's, on the host where rank 0 makes the memory.
    # The other ranks add zeros to it, so the sum is a broadcast. 63 random bits fit into an int64.
    token = [uuid.uuid4().int >> 65, os.getpid()] if rank == 0 else [0, 0]
    shared = torch.tensor(token, dtype=torch.int64, device="cpu")
    through_group.all_reduce(shared).wait()
    name = f"{_NAME_START}{int(shared[1])}-{int(shared[0]):x}"
    handle: int | None = None
    try:
        if rank == 0:
            remove_abandoned_memory()
            handle = _try_open(name, rank, world_size)
        # Rank 0 makes the memory before any other rank opens it. ``_all`` comes first in each
        # condition because every rank has to take part in every agreement, whatever failed on it.
        if _all(through_group, rank != 0 or handle is not None) and rank != 0:
            handle = _try_open(name, rank, world_size)
        joined = _all(through_group, handle is not None)
    finally:
        ops.cross_process_unlink(name)
    if _all(through_group, joined and handle is not None and ops.cross_process_connect(handle)):
        if handle is None:
            raise zero_ext_bug("all ranks have joined, but this one has no handle")
        return CrossProcessTransport(handle, through_group, timeout_seconds)
    if handle is not None:
        ops.cross_process_close(handle)
    return through_group


def remove_abandoned_memory(folder: Path = _MEMORY_FOLDER) -> list[str]:
    """Remove the shared memory of this user left by processes that were killed before all ranks had joined.

    Memory younger than a minute stays: its process may be in a container, where its number is another one.

    Returns:
        The names removed.
    """
    removed = []
    with contextlib.suppress(OSError):
        for path in sorted(folder.iterdir()):
            found = _OWN_NAME.fullmatch(path.name)
            if found and _is_abandoned(path, int(found[1])):
                path.unlink(missing_ok=True)
                removed.append(path.name)
    return removed


def _is_abandoned(path: Path, process: int) -> bool:
    try:
        status = path.lstat()
        os.kill(process, 0)
    except ProcessLookupError:
        return status.st_uid == os.geteuid() and time.time() - status.st_mtime > _YOUNGEST_SECONDS
    except OSError:
        # The process belongs to another user, or the file is gone.
        return False
    return False


def _try_open(name: str, rank: int, world_size: int) -> int | None:
    handle = uuid.uuid4().int >> 65
    try:
        ops.cross_process_open(handle, name, rank, world_size, rank == 0)
    except RuntimeError:
        return None
    return handle


def _all(group: ProcessGroupTransport, mine: bool) -> bool:
    refusals = torch.tensor([int(not mine)], dtype=torch.int64, device="cpu")
    group.all_reduce(refusals).wait()
    return int(refusals) == 0
