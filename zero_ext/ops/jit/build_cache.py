"""The cache of just-in-time builds, and how processes share it.

``$XDG_CACHE_HOME/zero_ext`` (by default ``~/.cache/zero_ext``) holds one folder per build: the module, its
checksum, the log, and a lock for the ranks that start together. A module appears there complete or not at
all.

A module is native code, and whoever can write to its path runs code as this user. So the owner and mode of
the module, of its folder and of every parent up to the home folder are checked before anything is loaded or
written. Where they do not pass, modules are built in a private folder below the system's temporary folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

# Distinguishes one state of a file from the next: a replaced file has another inode.
FileState = tuple[int, int]
_MOST_LINKS = 40  # as many as Linux follows
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def cache_folder() -> Path:
    """Return the folder of all just-in-time builds: the user's cache, or a private folder if others can write
    to that one.

    Raises:
        RuntimeError: others can write to the private folder too.
    """
    folder = _user_cache()
    reason = distrust(folder)
    return folder if reason is None else _private_folder(reason)


def distrust(path: Path) -> str | None:
    """Return why another user could put a module at `path`, or None.

    Symbolic links are followed one at a time, and every folder on the way is checked, but for those above the
    home folder. A missing path passes: this user creates it. A folder with the sticky bit like ``/tmp``
    passes as a parent, because others cannot replace entries that this user owns. As the last folder it does
    not, because others can add entries.
    """
    try:
        above_user_folder: Sequence[Path] = Path.home().resolve().parents
    except RuntimeError:  # a user without an entry, as in containers
        above_user_folder = ()
    path = path.absolute()
    last = (path, path.resolve())
    for each, facts in _steps(path):
        if each in above_user_folder:
            continue
        if facts.st_uid not in (os.getuid(), 0):
            return f"{each}: expected it to belong to user {os.getuid()} or root, got user {facts.st_uid}"
        if stat.S_ISLNK(facts.st_mode):
            continue
        if not stat.S_ISDIR(facts.st_mode) and each not in last:
            return None  # like /dev/null: nothing can be below it
        sticky_parent = bool(facts.st_mode & stat.S_ISVTX) and each not in last
        if facts.st_mode & _OTHERS_WRITE and not sticky_parent:
            mode = stat.S_IMODE(facts.st_mode)
            return f"{each}: expected no write permission for group and others, got mode {mode:o}"
    return None


def _steps(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield every folder and symbolic link on the way to `path` that exists, from the root on."""
    waiting, at, links = list(reversed(path.parts[1:])), Path(path.anchor), 0
    yield at, at.lstat()
    while waiting:
        name = waiting.pop()
        if name == "..":
            at = at.parent
            continue
        each = at / name
        try:
            facts = each.lstat()
        except OSError:
            return
        yield each, facts
        if not stat.S_ISLNK(facts.st_mode):
            at = each
            continue
        links += 1
        if links > _MOST_LINKS:
            return
        target = each.readlink()
        at = Path(target.anchor) if target.is_absolute() else at
        waiting.extend(reversed(target.parts[1:] if target.is_absolute() else target.parts))


def _user_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).absolute() / "zero_ext"


def _private_folder(reason: str) -> Path:
    """Return the private folder that is used for `reason`; it is the same for all processes of this user."""
    folder = Path(tempfile.gettempdir()).absolute() / f"zero_ext-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    again = distrust(folder)
    if again is not None:
        raise RuntimeError(
            f"cache folders: {reason}, and {again}. Remove the write permission, or set XDG_CACHE_HOME to "
            "a folder that only you can write to."
        )
    _log_private_folder(reason, folder)
    return folder


@cache
def _log_private_folder(reason: str, folder: Path) -> None:
    print(f"zero_ext: {reason}. Modules are built in {folder} instead.", file=sys.stderr)


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
    """One module of the cache. A `folder` that others can write to is replaced by a private one."""

    folder: Path
    name: str  # like "_C_cuda"

    def __post_init__(self) -> None:
        reason = distrust(self.folder)
        if reason is not None:
            inside = self.folder.is_relative_to(_user_cache())
            below = self.folder.relative_to(_user_cache()) if inside else Path(self.folder.name)
            object.__setattr__(self, "folder", _private_folder(reason) / below)

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
        """Return whether the module is there with the bytes that were built, and nobody else can write to it.

        Raises:
            RuntimeError: others can write to the folder, which was safe before.
        """
        self.check_owner()
        if any(distrust(path) is not None for path in (self.path, self._checksum)):
            return False
        try:
            expected = self._checksum.read_text()
            contents = self.path.read_bytes()
        except OSError:
            return False
        return hashlib.sha256(contents).hexdigest() == expected

    def check_owner(self) -> None:
        """Refuse a folder into which another user could have put a module.

        Raises:
            RuntimeError: it belongs to another user, or others can write to it.
        """
        reason = distrust(self.folder)
        if reason is not None:
            raise RuntimeError(
                f"{reason}. Remove the write permission, or set XDG_CACHE_HOME to a folder that only you can "
                "write to."
            )

    def state(self) -> FileState | None:
        """Return the module file's state; None while there is no file."""
        return _state(self.path)

    def put(self, module: Path) -> None:
        """Move a finished file into its place, its checksum first, both on disk before they are seen."""
        checksum = module.with_suffix(".sha256")
        checksum.write_text(hashlib.sha256(module.read_bytes()).hexdigest())
        # A linker follows the umask, which may let the group write.
        module.chmod(0o755)
        checksum.chmod(0o644)
        for path in (checksum, module):
            with path.open("rb") as file:
                os.fsync(file.fileno())
        checksum.replace(self._checksum)
        module.replace(self.path)
        self._failure.unlink(missing_ok=True)

    def note_failure(self, text: str) -> None:
        """Write the reason of a failed build for the processes that wait for it."""
        note = self._failure.with_suffix(".part")
        note.write_text(text)
        note.replace(self._failure)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder and hold its lock; the kernel drops the lock when the holder dies.

        Raises:
            RuntimeError: the holder that was waited for failed to build the module, with its error; or the
                folder cannot be written to.
        """
        failed_before = _state(self._failure)
        try:
            # mkdir(parents=True) gives parents the mode of the umask.
            for folder in (*reversed(self.folder.parents), self.folder):
                if not folder.is_dir():
                    folder.mkdir(mode=0o755, exist_ok=True)
            self.check_owner()
            file = (self.folder / "lock").open("w")
        except OSError as error:
            raise RuntimeError(
                f"zero_ext.{self.name}: it must be built, but its cache folder {self.folder} cannot be "
                f"written to: {error.strerror}. Set XDG_CACHE_HOME to a folder that this user may write to."
            ) from error
        with file:
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
    """Return the modules in the cache, in the order of their folders' names.

    Folders that others can write to are left out.
    """
    paths = sorted(cache_folder().glob("**/_C*.abi3.so"))
    paths = [path for path in paths if distrust(path.parent) is None]
    return [CachedModule(path.parent, path.name.removesuffix(".abi3.so")) for path in paths]
