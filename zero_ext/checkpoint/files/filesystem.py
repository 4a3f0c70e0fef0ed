"""Every change a save makes to the disk goes through here: one seam to count, delay or fail in tests."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from pathlib import Path

DIRECT_ALIGNMENT = 4096


class Filesystem:
    """Files and directories of a checkpoint being written.

    ``block_bytes`` is the size of one large write. All methods raise OSError naming the path.
    """

    block_bytes = 8 << 20

    def make_directory(self, path: Path) -> None:
        """Make ``path`` and its missing parents; all of them survive a power cut."""
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for folder in missing:
            self.sync_directory(folder.parent)

    def create(self, path: Path) -> int:
        """Open a new file for writing, past the page cache where the file system allows; its descriptor."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            return os.open(path, flags | os.O_DIRECT, 0o644)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
        path.unlink(missing_ok=True)
        return os.open(path, flags, 0o644)

    def write(self, descriptor: int, data: memoryview, path: Path) -> None:
        """Write all of ``data``; continue after short writes."""
        if len(data) % DIRECT_ALIGNMENT:
            _use_page_cache(descriptor)
        try:
            while data:
                data = data[self._write_some(descriptor, data) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error

    def _write_some(self, descriptor: int, data: memoryview) -> int:
        try:
            written = os.write(descriptor, data)
        except OSError as error:
            # Some file systems accept the direct flag and refuse the write; a short write breaks alignment.
            if error.errno != errno.EINVAL or not _use_page_cache(descriptor):
                raise
            written = os.write(descriptor, data)
        if written == 0:
            raise OSError(errno.EIO, "the file system accepts no more bytes and gives no reason")
        return written

    def sync(self, descriptor: int, path: Path) -> None:
        """Wait until the file's bytes are on the disk."""
        try:
            os.fsync(descriptor)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error

    def sync_directory(self, path: Path) -> None:
        """Wait until the directory's entries are on the disk."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.sync(descriptor, path)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Move ``source`` over ``target`` in one step."""
        source.rename(target)

    def remove(self, path: Path) -> None:
        """Remove a file or a whole directory; nothing happens if there is none."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def write_file(self, path: Path, data: bytes) -> None:
        """Write a small file in one go; it is on the disk when this returns."""
        descriptor = self.create(path)
        try:
            self.write(descriptor, memoryview(data), path)
            self.sync(descriptor, path)
        finally:
            os.close(descriptor)


def _use_page_cache(descriptor: int) -> bool:
    """Leave direct I/O; False if the file was not in it."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if not flags & os.O_DIRECT:
        return False
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return True
