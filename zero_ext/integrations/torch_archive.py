"""The zip archives that ``torch.save`` writes, in a file of their own or among others."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zero_ext.checkpoint.files import CheckpointError, open_regular
from zero_ext.config.config_errors import clause_of

_READ_BYTES = 1 << 20


class UnfitContent(ValueError):
    """Part of a file is not what its library writes. The error that names the file completes its text."""


def verify_records(archive: zipfile.ZipFile) -> None:
    """Read every byte of ``archive``. ``zipfile.BadZipFile`` if a record has another checksum."""
    for record in archive.infolist():
        with archive.open(record) as content:
            while content.read(_READ_BYTES):
                pass


class _Window(io.RawIOBase):
    """Bytes [begin, begin + size) of ``file``."""

    def __init__(self, file: io.BufferedReader, begin: int, size: int) -> None:
        self._file, self._begin, self._size = file, begin, size
        self._at = 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        at = offset + (0, self._at, self._size)[whence]
        if at < 0:
            raise UnfitContent(f"position {at} is before the archive")
        self._at = at
        return at

    def read(self, size: int = -1, /) -> bytes:
        left = max(self._size - self._at, 0)
        self._file.seek(self._begin + self._at)
        found = self._file.read(left if size < 0 else min(size, left))
        self._at += len(found)
        return found


@contextmanager
def torch_archive(
    path: Path, advice: str = "Use another checkpoint.", begin: int = 0, size: int | None = None
) -> Iterator[zipfile.ZipFile]:
    """Open what ``torch.save`` wrote to ``size`` bytes of ``path`` from ``begin`` on, by default to all.

    CheckpointError, with ``advice``, for anything else, also if that is found while the archive is open.
    """
    try:
        with (
            os.fdopen(open_regular(path), "rb") as file,
            zipfile.ZipFile(file if size is None else _Window(file, begin, size)) as archive,
        ):
            for record in archive.infolist():
                # One that is compressed can be a thousand times as long as the file.
                if record.compress_type != zipfile.ZIP_STORED:
                    raise UnfitContent(f"record {record.filename!r:.80} is compressed")
            yield archive
    except (zipfile.BadZipFile, OSError, EOFError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: truncated, damaged or not written by torch.save: {first_line(error)}. {advice}"
        ) from error


def first_line(error: Exception) -> str:
    """Return the beginning of an error's text as a clause, with its class unless it is ``UnfitContent``."""
    lines = str(error).strip().splitlines() or ["no reason given"]
    name = "" if isinstance(error, UnfitContent) else f"{type(error).__name__}: "
    return f"{name}{clause_of(lines[0])}"
