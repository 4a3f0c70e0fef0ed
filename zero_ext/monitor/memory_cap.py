"""A cap on the memory of a child process: a memory cgroup where one may be made, else RLIMIT_DATA."""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

CGROUPS = Path("/sys/fs/cgroup")
_REMOVE_SECONDS = 5.0


class MemoryCap(Protocol):
    """Hold a process and its children to `nbytes` of memory."""

    @property
    def nbytes(self) -> int:
        """Bytes it allows."""

    @property
    def name(self) -> str:
        """The mechanism that enforces it."""

    @property
    def watched(self) -> str:
        """The memory that it counts: "resident" of all processes, or private writable "data" of each."""

    def enter(self) -> None:
        """Put the calling process under the cap."""

    def kills(self) -> int | None:
        """Return the processes that the kernel ended at the cap.

        Returns:
            Their number; None where the kernel does not report it.
        """

    def close(self) -> None:
        """Remove the cap, after the last process under it has ended."""


@dataclass(frozen=True)
class DataLimit:
    """RLIMIT_DATA: private writable memory that the process has mapped, touched or not."""

    nbytes: int
    name: str = "RLIMIT_DATA"
    watched: str = "data"

    def enter(self) -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (self.nbytes, self.nbytes))

    def kills(self) -> int | None:
        return 0  # an allocation fails instead

    def close(self) -> None:
        pass


class Cgroup:
    """A control group of the memory controller, in `folder`, without swap."""

    watched = "resident"

    def __init__(self, folder: Path, nbytes: int, version: int) -> None:
        self.folder, self.nbytes = folder, nbytes
        self.name = f"memory cgroup v{version}"
        self._events = "memory.oom_control" if version == 1 else "memory.events"
        limits = (
            ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
            if version == 1
            else ("memory.max", "memory.swap.max")
        )
        folder.mkdir()
        try:
            _set(folder / limits[0], nbytes)
            if (folder / limits[1]).exists():
                _set(folder / limits[1], nbytes if version == 1 else 0)
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
