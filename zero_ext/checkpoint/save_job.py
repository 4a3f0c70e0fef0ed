"""One save, from the first byte to the commit, on one rank; the other ranks run the same stages."""

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
from zero_ext.checkpoint.files.filesystem import Filesystem
from zero_ext.checkpoint.format.directory import CheckpointDirectory, step_name
from zero_ext.checkpoint.format.manifest import (
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    SliceRecord,
    checksum,
    encode_manifest,
)
from zero_ext.checkpoint.format.manifest_check import check_cover, check_disjoint_bytes
from zero_ext.checkpoint.rank_consensus import RankConsensus
from zero_ext.checkpoint.transfer.shard_file import SavedSlice, stage_slices, write_shard

UNTOUCHED = "No checkpoint was changed."
_LATEST_IS_COMPLETE = "The latest checkpoint is complete."


@dataclass(frozen=True)
class SaveJob:
    """Everything a save needs, fixed when it was asked for. ``manifest`` has no files and slices yet."""

    directory: CheckpointDirectory
    manifest: Manifest
    slices: Sequence[SavedSlice]
    consensus: RankConsensus
    keep_last: int | None
    timeout_seconds: float
    filesystem: Filesystem

    @property
    def reads_stores(self) -> bool:
        """Return whether this rank's state is outside memory, if only one slice of it."""
        return any(saved.is_stored for saved in self.slices)

    def staged(self) -> SaveJob:
        """Return the same save of a copy in host memory, so that the state may change meanwhile."""
        return replace(self, slices=stage_slices(self.slices))

    def run(self) -> None:
        """Write, agree, commit. An error on any rank is raised on all, and leaves nothing behind."""
        with ExitStack() as held:
            self.consensus.stage(lambda: self._open(held), UNTOUCHED)
            written: list[str] = []
            self.consensus.stage(lambda: written.append(self._write()), UNTOUCHED)
            shards = self.consensus.collect(written[0].encode())
            self.consensus.stage(lambda: self._commit(shards), _LATEST_IS_COMPLETE)
        self.consensus.raise_interrupt()

    def _open(self, held: ExitStack) -> None:
        if self.consensus.rank != 0:
            return
        self.filesystem.make_directory(self.directory.root)
        # Half the time: the other ranks are waiting for this one, and must live to hear that it gave up.
        held.enter_context(self.directory.locked(self.timeout_seconds / 2))
        held.push(self._discard_after_error)
        self.directory.clean(self.filesystem)
        self.filesystem.make_directory(self.directory.saving(self.manifest.step))

    def _write(self) -> str:
        path = self.directory.saving(self.manifest.step)
        if not path.is_dir():
            raise CheckpointError(
                f"{self.directory.root}: expected a folder on a file system that all ranks share, got one in "
                f"which '{path.name}', which rank 0 made, is not visible. Save to a shared file system."
            )
        file, records = write_shard(self.filesystem, path, self.consensus.rank, self.slices)
        return json.dumps([file.model_dump(), [record.model_dump() for record in records]])

    def _commit(self, shards: list[bytes]) -> None:
        if self.consensus.rank != 0:
            return
        manifest = self._complete(shards)
        path = self.directory.saving(manifest.step)
        self.filesystem.write_file(path / MANIFEST_NAME, encode_manifest(manifest))
        self.filesystem.sync_directory(path)
        self.directory.commit(self.filesystem, manifest.step)
        if self.keep_last is not None:
            self._prune(self.keep_last)

    def _complete(self, shards: list[bytes]) -> Manifest:
        """Return the manifest with every rank's records; ValueError if the slices do not cover the full
        state.
        """
        files: list[FileRecord] = []
        slices: list[SliceRecord] = []
        for shard in shards:
            file, records = json.loads(shard)
            files.append(FileRecord.model_validate(file))
            slices.extend(SliceRecord.model_validate(record) for record in records)
        manifest = self.manifest.model_copy(update={"files": files, "slices": slices})
        check_cover(manifest)
        check_disjoint_bytes(manifest)
        return manifest

    def _prune(self, keep_last: int) -> None:
        try:
            self.directory.prune(self.filesystem, keep_last, self.manifest.step)
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
                self.directory.discard(self.filesystem, self.manifest.step)

    def fingerprint(self) -> dict[str, Any]:
        """Return what all ranks must have in common: short values as they are, long ones as checksums."""
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
