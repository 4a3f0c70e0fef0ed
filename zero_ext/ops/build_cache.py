"""Where just-in-time builds lie, and how processes share them.

``$XDG_CACHE_HOME/zero_ext`` (by default ``~/.cache/zero_ext``) holds a folder for each build: the module,
its checksum, the log, and a lock for the ranks that start together. A module appears there complete or not
at all.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

# What distinguishes one state of a file from the next: a replaced file has another inode.
FileState = tuple[int, int]


def cache_folder() -> Path:
    """Folder of all just-in-time builds."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "zero_ext"


def build_key(root: Path, names: list[str], settings: list[str]) -> str:
    """Hash of what a module depends on: torch, the kind of machine, the settings, every file of `names`.

    Not the compilers: a module that one of them made is as good on a machine that has none.
    """
    digest = hashlib.sha256()
    digest.update("\0".join([torch.__version__, platform.machine(), *settings]).encode())
    for name in names:
        digest.update(f"\0{name}\0".encode())
        digest.update((root / name).read_bytes())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class CachedModule:
    """The place of one module in the cache."""

    folder: Path
    name: str  # like "_C_cuda"

    @property
    def path(self) -> Path:
        return self.folder / f"{self.name}.abi3.so"

    @property
    def log(self) -> Path:
        return self.folder / "build.log"

    @property
    def _checksum(self) -> Path:
        return self.folder / f"{self.path.name}.sha256"

    @property
    def _failure(self) -> Path:
        return self.folder / "failed.txt"

    def is_complete(self) -> bool:
        """Whether the module is there with the bytes that were built.

        Raises:
            RuntimeError: the folder is another user's, or others may write to it.
        """
        try:
            expected = self._checksum.read_text()
            contents = self.path.read_bytes()
        except OSError:
            return False
        self.check_owner()
        return hashlib.sha256(contents).hexdigest() == expected

    def check_owner(self) -> None:
        """Refuses a folder into which another user could have put a module.

        Raises:
            RuntimeError: it belongs to neither this user nor root, or others may write to it.
        """
        facts = self.folder.stat()
        if facts.st_uid not in (os.getuid(), 0) or facts.st_mode & 0o002:
            raise RuntimeError(
                f"{self.folder} belongs to user {facts.st_uid} with mode {facts.st_mode & 0o777:o}, and "
                f"modules are loaded only from folders of this user ({os.getuid()}) or root that others "
                "cannot write to; remove it, or set XDG_CACHE_HOME to a folder of your own"
            )

    def state(self) -> FileState | None:
        """The module file's state; None while there is no file."""
        return _state(self.path)

    def put(self, module: Path) -> None:
        """Moves a finished file into its place, its checksum first, both on disk before they are seen."""
        checksum = module.with_suffix(".sha256")
        checksum.write_text(hashlib.sha256(module.read_bytes()).hexdigest())
        for path in (checksum, module):
            with path.open("rb") as file:
                os.fsync(file.fileno())
        checksum.replace(self._checksum)
        module.replace(self.path)
        self._failure.unlink(missing_ok=True)

    def note_failure(self, text: str) -> None:
        """Leaves the reason of a failed build for those who wait for it."""
        note = self._failure.with_suffix(".part")
        note.write_text(text)
        note.replace(self._failure)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Makes the folder and holds its lock; the kernel drops the lock when the holder dies.

        Raises:
            RuntimeError: the holder that was waited for failed to build the module, with its error; or the
                folder cannot be written to.
        """
        failed_before = _state(self._failure)
        try:
            self.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            file = (self.folder / "lock").open("w")
        except OSError as error:
            raise RuntimeError(
                f"zero_ext.{self.name} must be built, but its cache folder {self.folder} cannot be written "
                f"to: {error.strerror}; set XDG_CACHE_HOME to a folder that this user may write to"
            ) from error
        with file:
            self.check_owner()
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if sys.stderr.isatty():
                    print(f"zero_ext: waiting for the process that builds {self.name}", file=sys.stderr)
                fcntl.flock(file, fcntl.LOCK_EX)
                if _state(self._failure) not in (None, failed_before):
                    raise RuntimeError(self._failure.read_text()) from None
            yield


def _state(path: Path) -> FileState | None:
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_ino, facts.st_mtime_ns


def cached_modules() -> list[CachedModule]:
    """The modules in the cache, in the order of their folders' names."""
    paths = sorted(cache_folder().glob("**/_C*.abi3.so"))
    return [CachedModule(path.parent, path.name.removesuffix(".abi3.so")) for path in paths]
