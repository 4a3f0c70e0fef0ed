"""The memory of processes: what one holds, what its files take, and a cap on that of a child process."""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
_REMOVE_SECONDS = 5.0


def resident_bytes() -> int:
    """Return the resident set size of this process.

    Returns:
        Bytes; on systems that do not report it, the largest size so far.
    """
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def file_bytes(folder: Path) -> int:
    """Return the bytes that files below `folder` take on their device, also while files come and go.

    Args:
        folder: the folder.

    Returns:
        Bytes.
    """
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            total += path.stat().st_blocks * 512
    return total


class MemoryCap(ABC):
    """Hold a process and its children to `nbytes` of memory.

    Attributes:
        nbytes: bytes it allows.
        name: the mechanism that enforces it.
        watched: the memory that it counts: "resident" of all processes, or private writable "data" of each.
    """

    nbytes: int
    name: str
    watched: str

    @abstractmethod
    def enter(self) -> None:
        """Put the calling process under the cap."""

    def kills(self) -> int | None:
        """Return the processes that the kernel ended at the cap.

        Returns:
            Their number; None where the kernel does not report it.
        """
        return 0

    def close(self) -> None:  # noqa: B027
        """Remove the cap, after the last process under it has ended."""


class DataLimit(MemoryCap):
    """RLIMIT_DATA: private writable memory that the process has mapped, touched or not.

    The kernel ends nobody at it: an allocation fails instead.
    """

    name = "RLIMIT_DATA"
    watched = "data"

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def enter(self) -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (self.nbytes, self.nbytes))


class Cgroup(MemoryCap):
    """A control group of the memory controller, in `folder`, without swap."""

    watched = "resident"

    def __init__(self, folder: Path, nbytes: int, version: int) -> None:
        self.folder, self.nbytes = folder, nbytes
        self.name = f"memory cgroup v{version}"
        self._events, limit, swap = (
            ("memory.oom_control", "memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
            if version == 1
            else ("memory.events", "memory.max", "memory.swap.max")
        )
        folder.mkdir()
        try:
            _set(folder / limit, nbytes)
            if (folder / swap).exists():
                _set(folder / swap, nbytes if version == 1 else 0)
            (folder / "cgroup.procs").open("r+").close()
        except OSError:
            folder.rmdir()
            raise

    def enter(self) -> None:
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def kills(self) -> int | None:
        for line in (self.folder / self._events).read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
        return None

    def close(self) -> None:
        until = time.monotonic() + _REMOVE_SECONDS  # an ended process may take a moment to leave
        while True:
            try:
                return self.folder.rmdir()
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)


def _set(path: Path, value: int) -> None:
    with path.open("r+") as file:  # never makes the file: where it is missing this is no control group
        file.write(str(value))


def candidates(membership: str, mount: Path = CGROUPS) -> Iterator[tuple[Path, int]]:
    """Yield where a control group may be made, and its version, by the text of /proc/self/cgroup.

    Below the own group, so that limits which hold already go on holding; under version 2, where a group with
    processes may have no other capped children.
    """
    for line in membership.splitlines():
        number, controllers, path = line.split(":", 2)
        own = path.lstrip("/")
        if "memory" in controllers.split(","):
            yield mount / "memory" / own, 1
        elif number == "0" and not controllers:
            yield mount / own, 2
            if own:
                yield (mount / own).parent, 2


@contextlib.contextmanager
def capped(size: Callable[[str], int]) -> Iterator[MemoryCap]:
    """Set up the strongest cap that this machine allows, and remove it at the end.

    Args:
        size: called with what the cap counts, "resident" or "data"; returns bytes.

    Yields:
        The cap, which a process enters by `enter()`.
    """
    cap = _make(size)
    try:
        yield cap
    finally:
        cap.close()


def _make(size: Callable[[str], int]) -> MemoryCap:
    membership = Path("/proc/self/cgroup")
    if membership.exists():
        for parent, version in candidates(membership.read_text()):
            with contextlib.suppress(OSError):
                name = f"zero-ext-{secrets.token_hex(4)}"
                return Cgroup(parent / name, size(Cgroup.watched), version)
    return DataLimit(size(DataLimit.watched))
