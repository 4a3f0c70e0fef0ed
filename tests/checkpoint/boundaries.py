"""A storage that counts every change made to the disk, and strikes at one of them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from zero_ext.checkpoint.files import Filesystem


class CountingFilesystem(Filesystem):
    """Calls ``strike(number, name)`` before every change; cuts the write of number ``torn_write`` in half."""

    block_bytes = 1 << 16

    def __init__(self, strike: Callable[[int, str], None], torn_write: int | None = None) -> None:
        self.names: list[str] = []
        self._strike = strike
        self._writes_until_torn = torn_write
        self._lock = threading.Lock()

    def _reach(self, name: str) -> int:
        with self._lock:
            number = len(self.names)
            self.names.append(name)
        self._strike(number, name)
        return number

    def make_directory(self, path: Path) -> None:
        self._reach(f"make {path.name}")
        super().make_directory(path)

    def create(self, path: Path) -> int:
        self._reach(f"create {path.name}")
        return super().create(path)

    def write(self, descriptor: int, data: memoryview, path: Path) -> None:
        self._reach(f"write {path.name}")
        if self._writes_until_torn is not None:
            if self._writes_until_torn == 0:
                super().write(descriptor, data[: len(data) // 2], path)
                os.kill(os.getpid(), signal.SIGKILL)
            self._writes_until_torn -= 1
        super().write(descriptor, data, path)

    def sync(self, descriptor: int, path: Path) -> None:
        self._reach(f"sync {path.name}")
        super().sync(descriptor, path)

    def rename(self, source: Path, target: Path) -> None:
        self._reach(f"rename {source.name} to {target.name}")
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        self._reach(f"remove {path.name}")
        super().remove(path)


def die_at(boundary: int, torn: bool) -> CountingFilesystem:
    """SIGKILL before the change of number ``boundary``, or in the middle of the write of that number."""

    def strike(number: int, name: str) -> None:
        if number == boundary and not torn:
            os.kill(os.getpid(), signal.SIGKILL)

    return CountingFilesystem(strike, boundary if torn else None)


def fail_at(
    boundary: int, error: int, lasting: Callable[[str], bool] = lambda name: False
) -> CountingFilesystem:
    """Raises OSError at that change, and at all later ones whose name ``lasting`` says cannot succeed."""

    def strike(number: int, name: str) -> None:
        if number == boundary or (number > boundary and lasting(name)):
            raise OSError(error, os.strerror(error), name)

    return CountingFilesystem(strike)
