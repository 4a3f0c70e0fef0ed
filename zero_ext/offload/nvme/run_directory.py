"""The directory for a process's files on a device, locked while the process lives."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import socket
import stat
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK_NAME = "lock"
DATA_NAME = "extents.bin"
_ATTEMPTS = 10
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


class RunDirectory:
    """A directory ``zero_ext-<host>-pid<process>-<random>`` of this process below ``device_path``.

    A lock file in it is held (flock) until the process ends in whatever way, so two jobs on one path stay
    apart, and a lock that is free marks a crashed run. Directories of crashed runs of this host and user are
    removed first. ``close`` removes this one, as do the garbage collector and the interpreter's exit; a
    forked child leaves it alone.

    Raises:
        RuntimeError: the path is missing, not a directory, not writable, full, or on a file system without
            locks; the message names it and says what to do.
    """

    def __init__(self, device_path: str | Path) -> None:
        parent = Path(device_path).absolute()  # the process may change its directory
        if not parent.is_dir():
            seen = "a file" if parent.exists() else "a path that does not exist"
            raise RuntimeError(
                f"nvme path '{parent}': expected a directory, got {seen}. Name an existing directory on "
                "the device."
            )
        try:
            remove_abandoned(parent)
            self.path, lock = _create(parent)
        except OSError as error:
            raise RuntimeError(
                f"nvme path '{parent}': no directory can be made in it: {error.strerror}. Name a directory "
                "that this user may write to and that has free space."
            ) from error
        self._finalizer = weakref.finalize(self, _close, self.path, lock, os.getpid())

    @property
    def data_path(self) -> Path:
        """Return where the store's file belongs; it does not exist yet."""
        return self.path / DATA_NAME

    def close(self) -> None:
        """Remove the directory and what is in it; calling it again does nothing."""
        self._finalizer()


def remove_abandoned(device_path: str | Path) -> list[str]:
    """Remove the directories that ended runs of this host and user left below ``device_path``.

    Only directories of our name pattern, owned by this user, with a lock file that nobody holds; in them
    only files of our names. Symbolic links are never followed. Returns the names removed; warns of a
    directory that holds something else and therefore stays.
    """
    ours = re.compile(re.escape(_name_start()) + r"\d+-[0-9a-f]{16}")
    removed = []
    with _open_folder(device_path) as parent:
        with os.scandir(parent) as entries:
            names = sorted(entry.name for entry in entries)
        for name in names:
            if ours.fullmatch(name) and _remove_if_abandoned(parent, name):
                removed.append(name)
    return removed


def _name_start() -> str:
    # The host is part of the name because locks on a network file system may not reach other hosts.
    host = re.sub(r"[^A-Za-z0-9.]", "-", socket.gethostname())[:64]
    return f"zero_ext-{host}-pid"


def _create(parent: Path) -> tuple[Path, int]:
    """Return a new directory and its locked lock file.

    Another process may take the directory for an abandoned one as long as the lock is not held, so the
    directory counts only if its lock file still has a name afterwards.
    """
    for _ in range(_ATTEMPTS):
        path = parent / f"{_name_start()}{os.getpid()}-{secrets.token_hex(8)}"
        path.mkdir(mode=0o700)
        try:
            lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue
        except OSError:
            path.rmdir()
            raise
        try:
            if _try_lock(lock) and os.fstat(lock).st_nlink > 0:
                return path, lock
        except OSError:
            (path / LOCK_NAME).unlink()
            path.rmdir()
            os.close(lock)
            raise
        os.close(lock)
    raise RuntimeError(
        f"nvme path '{parent}': {_ATTEMPTS} new directories were removed by other processes. Stop what "
        "removes them, or name another directory."
    )


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            reason = f"{error.strerror}: this file system has no locks (flock), which keep jobs apart"
            raise OSError(error.errno, reason) from error
        raise
    return True


def _remove_if_abandoned(parent: int, name: str) -> bool:
    try:
        with _open_folder(name, parent) as folder:
            # The check uses the open descriptor because the path could be exchanged between a check
            # and the removal.
            if os.fstat(folder).st_uid != os.geteuid():
                return False
            try:
                lock = os.open(
                    LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder
                )
            except FileNotFoundError:
                # Its creation or its removal was cut off; rmdir takes it only if it is empty.
                return _remove_folder(parent, name)
            try:
                if not _is_own_file(os.fstat(lock)) or not _try_lock(lock):
                    return False
                _remove_files(folder)
                if not _remove_folder(parent, name):
                    _warn_of_foreign_files(name)
                    return False
                return True
            finally:
                os.close(lock)
    except (FileNotFoundError, PermissionError, NotADirectoryError):
        return False
    except OSError as error:
        # A symbolic link or a socket stands in the place of the directory or of its lock file.
        if error.errno in (errno.ELOOP, errno.ENXIO):
            return False
        raise


def _is_own_file(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def _remove_files(folder: int) -> None:
    """Remove our files from the open directory, the lock file last."""
    # If this is cut off in between, the free lock still marks the directory as one to remove.
    for name in (DATA_NAME, LOCK_NAME):
        try:
            if _is_own_file(os.stat(name, dir_fd=folder, follow_symlinks=False)):
                os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            continue


def _remove_folder(parent: int, name: str) -> bool:
    """Remove an empty directory; whether there is none any more, whoever removed it."""
    try:
        os.rmdir(name, dir_fd=parent)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def _warn_of_foreign_files(name: str) -> None:
    warnings.warn(
        f"the run directory '{name}' of an ended run holds files that are not zero_ext's; remove it by hand",
        RuntimeWarning,
        stacklevel=2,
    )


def _close(path: Path, lock: int, process: int) -> None:
    if os.getpid() != process:
        return
    try:
        with _open_folder(path.parent) as parent, _open_folder(path.name, parent) as folder:
            _remove_files(folder)
            if not _remove_folder(parent, path.name):
                _warn_of_foreign_files(path.name)
    except FileNotFoundError:
        pass
    finally:
        # A forked child may hold the descriptor too, so closing it would not be enough.
        fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)


@contextmanager
def _open_folder(path: str | Path, parent: int | None = None) -> Iterator[int]:
    """Return an open directory; one named below ``parent`` may not be a symbolic link."""
    flags = _OPEN_FOLDER | (os.O_NOFOLLOW if parent is not None else 0)
    descriptor = os.open(path, flags, dir_fd=parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
