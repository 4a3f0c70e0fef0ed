"""One save, from the first byte to the commit, on one rank; the other ranks run the same stages beside it."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from zero_ext.checkpoint.files.checkpoint_error import CheckpointError
from zero_ext.checkpoint.files.filesystem import Storage
from zero_ext.checkpoint.format.directory import CheckpointDirectory, step_name
from zero_ext.checkpoint.format.manifest import (
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    PieceRecord,
    checksum,
    encode_manifest,
)
from zero_ext.checkpoint.format.manifest_check import check_cover, check_disjoint_bytes
from zero_ext.checkpoint.rank_consensus import Agreement
from zero_ext.checkpoint.transfer.shard_file import OwnedPiece, stage_pieces, write_shard

UNTOUCHED = "No checkpoint was changed"
_LATEST_IS_WHOLE = "The latest checkpoint is whole"


@dataclass(frozen=True)
class SaveJob:
    """Everything a save needs, fixed when it was asked for. ``manifest`` has no files and pieces yet."""

    directory: CheckpointDirectory
    manifest: Manifest
    pieces: Sequence[OwnedPiece]
    agreement: Agreement
    keep_last: int | None
    timeout_seconds: float
    storage: Storage

    @property
    def reads_stores(self) -> bool:
        """Whether this rank's part lies outside memory, if only a piece of it."""
        return any(piece.is_stored for piece in self.pieces)

    def staged(self) -> SaveJob:
        """The same save of a copy in host memory, so that the state may change meanwhile."""
        return replace(self, pieces=stage_pieces(self.pieces))

    def run(self) -> None:
        """Writes, agrees, commits. An error on any rank is raised on all, and leaves nothing behind."""
        with ExitStack() as held:
            self.agreement.stage(lambda: self._open(held), UNTOUCHED)
            written: list[str] = []
            self.agreement.stage(lambda: written.append(self._write()), UNTOUCHED)
            parts = self.agreement.collect(written[0].encode())
            self.agreement.stage(lambda: self._commit(parts), _LATEST_IS_WHOLE)
        self.agreement.raise_interrupt()

    def _open(self, held: ExitStack) -> None:
        if self.agreement.rank != 0:
            return
        self.storage.make_directory(self.directory.root)
        # Half the time: the other ranks are waiting for this one, and must live to hear that it gave up.
        held.enter_context(self.directory.locked(self.timeout_seconds / 2))
        held.push(self._discard_after_error)
        self.directory.clean(self.storage)
        self.storage.make_directory(self.directory.saving(self.manifest.step))

    def _write(self) -> str:
        path = self.directory.saving(self.manifest.step)
        if not path.is_dir():
            raise CheckpointError(
                f"{self.directory.root}: expected a folder on a file system that all ranks share, got one in "
                f"which '{path.name}', which rank 0 made, is not visible. Save to a shared file system."
            )
        file, records = write_shard(self.storage, path, self.agreement.rank, self.pieces)
        return json.dumps([file.model_dump(), [record.model_dump() for record in records]])

    def _commit(self, parts: list[bytes]) -> None:
        if self.agreement.rank != 0:
            return
        manifest = self._complete(parts)
        path = self.directory.saving(manifest.step)
        self.storage.write_file(path / MANIFEST_NAME, encode_manifest(manifest))
        self.storage.sync_directory(path)
        self.directory.commit(self.storage, manifest.step)
        if self.keep_last is not None:
            self._prune(self.keep_last)

    def _complete(self, parts: list[bytes]) -> Manifest:
        """The manifest with every rank's part; ValueError if the pieces do not make the whole state."""
        files: list[FileRecord] = []
        pieces: list[PieceRecord] = []
        for part in parts:
            file, records = json.loads(part)
            files.append(FileRecord.model_validate(file))
            pieces.extend(PieceRecord.model_validate(record) for record in records)
        manifest = self.manifest.model_copy(update={"files": files, "pieces": pieces})
        check_cover(manifest)
        check_disjoint_bytes(manifest)
        return manifest

    def _prune(self, keep_last: int) -> None:
        try:
            self.directory.prune(self.storage, keep_last, self.manifest.step)
        except OSError as error:
            warnings.warn(
                f"{step_name(self.manifest.step)} is saved, but an older one could not be removed: {error}",
                RuntimeWarning,
                stacklevel=2,
            )

    def _discard_after_error(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            # The first error is the one to tell; the next save removes what this cannot.
            with contextlib.suppress(OSError):
                self.directory.discard(self.storage, self.manifest.step)

    def fingerprint(self) -> dict[str, Any]:
        """What all ranks must have in common: short values as they are, long ones as checksums."""
        tables = self.manifest.model_dump(include={"parameters", "buffers"})
        scalars = {
            f"checksum of scalar_state[{key!r}]": checksum(json.dumps(value).encode())
            for key, value in self.manifest.scalar_state.items()
        }
        return {
            "step": self.manifest.step,
            "keep_last": self.keep_last,
            "checksum of the parameter table": checksum(json.dumps(tables["parameters"]).encode()),
            "checksum of the buffer table": checksum(json.dumps(tables["buffers"]).encode()),
            **scalars,
        }
