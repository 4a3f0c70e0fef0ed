"""The checkpoint directory: which steps are complete, which is the latest, what a crash left behind.

A step is written under a name that starts with a dot and appears under its own name by one rename. ``latest``
is a file with that name in it, replaced the same way. So every moment has a complete latest checkpoint.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zero_ext.checkpoint.files import CheckpointError, Filesystem, read_limited
from zero_ext.checkpoint.format.manifest import MANIFEST_NAME

LATEST_NAME = "latest"
LARGEST_STEP = 10**12
_STEP = re.compile(r"step-(\d{6,13})")
_SAVING, _REPLACED, _REMOVED = ".saving-", ".replaced-", ".removed-"
_NEW_LATEST = ".latest"
_LOCK = ".lock"
_LOCK_POLL_SECONDS = 0.05
_OTHERS = "Weights of another library's checkpoint are for zero_ext.load_weights."


def step_name(step: int) -> str:
    """Return the directory name of a step: ``step-000123``."""
    return f"step-{step:06d}"


class CheckpointDirectory:
    """The directory ``root`` that holds the checkpoints of one run."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def steps(self) -> list[int]:
        """Return the steps with a committed checkpoint, ascending."""
        found = set()
        for path in self.root.iterdir() if self.root.is_dir() else ():
            name = path.name.removeprefix(_REPLACED)
            step = _step_of(name)
            if step is not None and path.is_dir():
                found.add(step)
        return sorted(found)

    def saving(self, step: int) -> Path:
        """Return where a step is written before it is committed."""
        return self.root / (_SAVING + step_name(step))

    def committed(self, step: int) -> Path:
        """Return where a step is found: under another name after a crash while it was replaced."""
        path = self.root / step_name(step)
        replaced = self.root / (_REPLACED + step_name(step))
        return replaced if not path.exists() and replaced.exists() else path

    def resolve(self, step: int | None) -> int:
        """``step`` itself if it is there, the latest one for None. CheckpointError names what there is."""
        known = self.steps()
        if step is None:
            step = self._latest(known)
        if step not in known:
            there = ", ".join(step_name(other) for other in known) or "none"
            raise CheckpointError(
                f"{self.root}: expected a checkpoint {step_name(step)}, got {there}. Pass one of these "
                "steps, or another directory."
            )
        return step

    def _latest(self, known: list[int]) -> int:
        path = self.root / LATEST_NAME
        try:
            name = read_limited(path, 64).decode("ascii", "replace").strip()
        except FileNotFoundError:
            # A crash between a first checkpoint's commit and its 'latest' file: the checkpoint is complete.
            if known:
                return known[-1]
            raise CheckpointError(
                f"{self.root}: it holds no checkpoint. Save one first, or pass the directory that holds "
                f"some. {_OTHERS}"
            ) from None
        except OSError as error:
            raise CheckpointError(
                f"{path}: it cannot be read: {error.strerror}. Make it readable, or pass step=."
            ) from error
        step = _step_of(name)
        if step is None:
            raise CheckpointError(
                f"{path}: expected a name like {step_name(123)!r}, got {name!r}. Pass step= to load without "
                f"it. {_OTHERS}"
            )
        return step

    @contextmanager
    def locked(self, timeout_seconds: float) -> Iterator[None]:
        """Keep other savers out; the kernel releases the lock if this process dies.

        Raises:
            CheckpointError: another save held it until the timeout, or it is no regular file.
        """
        descriptor = self._open_lock()
        try:
            self._lock(descriptor, timeout_seconds)
            try:
                yield
            finally:
                # A forked child may hold the descriptor too, so closing it would not be enough.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        finally:
            os.close(descriptor)

    def _open_lock(self) -> int:
        path = self.root / _LOCK
        # Of a symbolic link the target would be created, wherever that is.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            descriptor = os.open(path, flags, 0o644)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV):
                raise
        else:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return descriptor
            os.close(descriptor)
        kind = "a symbolic link" if path.is_symlink() else "something else"
        raise CheckpointError(f"{path}: expected a regular file, got {kind}. Remove it and save again.")

    def _lock(self, descriptor: int, timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
                    warnings.warn(
                        f"{self.root}: this file system has no locks ({error.strerror}). "
                        "Let one job at a time save here.",
                        RuntimeWarning,
                        stacklevel=2,
                    )
                    return
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{self.root}: another save has held this directory for {timeout_seconds:g} s. "
                    "Wait for its end, or save other models to directories of their own."
                )
            time.sleep(_LOCK_POLL_SECONDS)

    def clean(self, filesystem: Filesystem) -> None:
        """Remove what saves that crashed have left; a step they were replacing gets its name back."""
        for path in sorted(self.root.iterdir()):
            if path.name.startswith(_REPLACED):
                original = self.root / path.name.removeprefix(_REPLACED)
                if _step_of(original.name) is None:
                    continue
                if original.exists():
                    self._remove(filesystem, path)
                else:
                    filesystem.rename(path, original)
            elif self._is_leftover(path.name):
                filesystem.remove(path)

    def _is_leftover(self, name: str) -> bool:
        for prefix in (_SAVING, _REMOVED):
            if name.startswith(prefix):
                return _step_of(name.removeprefix(prefix)) is not None
        return name == _NEW_LATEST

    def commit(self, filesystem: Filesystem, step: int) -> None:
        """Give ``saving(step)``, complete and on the disk, its own name, and make it the latest."""
        final = self.root / step_name(step)
        replaced = self.root / (_REPLACED + step_name(step))
        if final.exists():
            filesystem.rename(final, replaced)
        filesystem.rename(self.saving(step), final)
        filesystem.sync_directory(self.root)
        filesystem.write_file(self.root / _NEW_LATEST, f"{step_name(step)}\n".encode())
        filesystem.rename(self.root / _NEW_LATEST, self.root / LATEST_NAME)
        filesystem.sync_directory(self.root)
        if replaced.exists():
            self._remove(filesystem, replaced)

    def discard(self, filesystem: Filesystem, step: int) -> None:
        """Remove what a save that failed has written."""
        filesystem.remove(self.saving(step))
        filesystem.remove(self.root / _NEW_LATEST)

    def prune(self, filesystem: Filesystem, keep_last: int, newest: int) -> None:
        """Remove all but the ``keep_last`` checkpoints saved last; ``newest`` stays in any case."""
        others = [step for step in self.steps() if step != newest]
        others.sort(key=lambda step: (self._saved_at(step), step), reverse=True)
        for step in others[keep_last - 1 :]:
            self._remove(filesystem, self.root / step_name(step))

    def _saved_at(self, step: int) -> int:
        try:
            return (self.committed(step) / MANIFEST_NAME).stat().st_mtime_ns
        except OSError:
            return 0

    def _remove(self, filesystem: Filesystem, path: Path) -> None:
        """Remove a directory, its name first: what is half removed must not pass for a checkpoint."""
        doomed = self.root / (_REMOVED + path.name.removeprefix(_REPLACED))
        filesystem.remove(doomed)
        filesystem.rename(path, doomed)
        filesystem.remove(doomed)


def _step_of(name: str) -> int | None:
    found = _STEP.fullmatch(name)
    if found is None or step_name(int(found[1])) != name:
        return None
    return int(found[1])
