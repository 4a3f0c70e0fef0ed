"""Saving: every rank writes its slices, all agree that every byte is on the disk, one rename commits."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from zero_ext.checkpoint.files import CheckpointError, Filesystem, brief
from zero_ext.checkpoint.format.directory import LARGEST_STEP, CheckpointDirectory, step_name
from zero_ext.checkpoint.format.json_state import encode
from zero_ext.checkpoint.format.manifest import (
    CHUNK_BYTES,
    FORMAT,
    MANIFEST_NAME,
    VERSION,
    BufferRecord,
    FileRecord,
    Manifest,
    ParameterRecord,
    SliceRecord,
    check_cover,
    check_disjoint_bytes,
    checksum,
    encode_manifest,
)
from zero_ext.checkpoint.format.state_source import ParameterDescription, StateSource
from zero_ext.checkpoint.format.tensor_files import dtype_name, dtype_named, memory_order
from zero_ext.checkpoint.rank_consensus import RankConsensus
from zero_ext.checkpoint.save_session import SaveHandle, session_of
from zero_ext.checkpoint.shard_file import saved_slices, stage_slices, write_shard
from zero_ext.checkpoint.state_slices import CheckpointSlice
from zero_ext.config.training import TagValidation

UNTOUCHED = "No checkpoint was changed."
_LATEST_IS_COMPLETE = "The latest checkpoint is complete."
_NOT_IN_BACKGROUND = (
    "async_save: state on NVMe or in 8-bit blocks is not copied in memory for a save in the background. This "
    "one was written before the call returned. Pass async_save=False to save the same way without this "
    "warning."
)


def save_state(
    directory: str | os.PathLike[str],
    source: StateSource,
    *,
    step: int | None = None,
    client_state: Any = None,
    keep_last: int | None = None,
    async_save: bool = False,
    extra: dict[str, Any] | None = None,
    tag_validation: TagValidation = "warn",
) -> SaveHandle:
    """Save the state of `source` as `directory/step-000123`; a collective.

    State that a rank keeps in a store (`StoredValues`) is streamed from there, without a copy in memory.
    Nothing holds its values while training changes them, so if any rank has such state, an asynchronous save
    copies nothing, says so in a RuntimeWarning of rank 0, and has written everything when it returns.

    If ranks name different directories, rank 0's is used, unless `tag_validation` is "fail". Every rank must
    have written its shard within `config.timeout_seconds`. Errors reach every rank. The last checkpoint stays
    complete whatever happens, a killed process included.

    Args:
        directory: holds the checkpoints.
        source: the state to save.
        step: number of the checkpoint; default the source's own count (`scalar_state()["steps"]`). One of the
            same number is replaced.
        client_state: the user's own state of None, numbers, text, bytes, lists, tuples, dicts and tensors up
            to 16 MiB; rank 0's is saved.
        keep_last: number of checkpoints to keep; older ones are removed once this one is complete.
        async_save: copy the state in host memory and return. Writing goes on in the background, and the next
            save or load of the source waits for it.
        extra: named states such as a scheduler's, of the same types as `client_state`.
        tag_validation: what different directories lead to. "warn" is a RuntimeWarning of the ranks that
            named another one than rank 0. "fail" is an error on all ranks before anything is written.

    Returns:
        The save.

    Raises:
        ValueError: an argument is out of range, or differs between ranks.
        TypeError: a state is of a type that cannot be saved.
        CheckpointError: everything else, such as a full disk or a rank that died.
    """
    session = session_of(source)
    group = session.group_of(source)
    consensus = RankConsensus(source.rank, source.world_size, group, f"saving to {directory}")
    jobs: list[SaveJob] = []

    def prepare() -> dict[str, Any]:
        session.finish_previous()
        _check_keep_last(keep_last)
        buffers = source.buffers()
        job = SaveJob(
            directory=CheckpointDirectory(Path(directory).absolute()),
            manifest=_describe(source, buffers, step, client_state, {} if extra is None else extra),
            slices=saved_slices(source.save_slices(), buffers if source.rank == 0 else {}),
            consensus=consensus,
            keep_last=keep_last,
            timeout_seconds=source.config.timeout_seconds,
            filesystem=Filesystem(),
        )
        jobs.append(job)
        return {
            "directory": str(job.directory.root),
            "fingerprint": job.fingerprint(),
            "reads_stores": any(not isinstance(saved.values, torch.Tensor) for saved in job.slices),
        }

    answers = consensus.stage(prepare, UNTOUCHED)
    in_background = async_save and not any(answer["reads_stores"] for answer in answers)

    def check_and_stage() -> None:
        _check_same([answer["fingerprint"] for answer in answers])
        jobs[0] = _in_directory(jobs[0], answers[0]["directory"], tag_validation)
        if in_background:
            # A copy in host memory: the state may change meanwhile.
            jobs[0] = replace(jobs[0], slices=stage_slices(jobs[0].slices))

    consensus.stage(check_and_stage, UNTOUCHED)
    job = jobs[0]
    handle = SaveHandle(job.manifest.step, job.directory.committed(job.manifest.step))
    if in_background:
        session.in_flight = handle
        return handle.run_in_background(job.run)
    handle.run(job.run)
    # Not sooner: where warnings are errors the other ranks would wait for this one.
    if async_save and source.rank == 0:
        warnings.warn(_NOT_IN_BACKGROUND, RuntimeWarning, stacklevel=2)
    return handle


def _check_keep_last(keep_last: int | None) -> None:
    if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
        raise ValueError(
            f"keep_last: expected a whole number from 1, or None to keep all, got {keep_last!r}. Pass one of "
            "these."
        )


def _in_directory(job: SaveJob, root: str, validation: TagValidation) -> SaveJob:
    """Return the same save in ``root``, the directory of rank 0."""
    own = job.directory.root
    if str(own) == root:
        return job
    problem = (
        f"save_checkpoint: directory: expected the same on all ranks, got '{root}' on rank 0 and '{own}' on "
        f"rank {job.consensus.rank}. "
    )
    advice = "Pass one directory, for example without a time or a rank in its name."
    if validation == "fail":
        raise ValueError(problem + advice)
    if validation == "warn":
        warnings.warn(f"{problem}All ranks save to that of rank 0. {advice}", RuntimeWarning, stacklevel=2)
    return replace(job, directory=CheckpointDirectory(Path(root)))


def _check_same(answers: list[dict[str, Any]]) -> None:
    for rank, answer in enumerate(answers):
        for name in {**answers[0], **answer}:
            first, seen = answers[0].get(name), answer.get(name)
            if seen != first:
                raise ValueError(
                    f"{name}: expected the same on all ranks, got {first} on rank 0 and {seen} on rank "
                    f"{rank}. Pass the same model, state and arguments on all ranks."
                )


def _describe(
    source: StateSource, buffers: Mapping[str, torch.Tensor], step: int | None, client_state: Any, extra: Any
) -> Manifest:
    scalar_state = source.scalar_state()
    step = scalar_state.get("steps") if step is None else step
    if type(step) is not int or not 0 <= step < LARGEST_STEP:
        raise ValueError(
            f"step: expected a whole number from 0 to {LARGEST_STEP - 1}, got {step!r}. Pass step= in this "
            "range."
        )
    if type(extra) is not dict or any(type(name) is not str or name.startswith("$") for name in extra):
        raise TypeError(
            "extra: expected a dict from names that do not begin with '$' to states, got "
            f"{brief(list(extra) if type(extra) is dict else type(extra).__name__)}. Pass such a dict."
        )
    return Manifest(
        format=FORMAT,
        version=VERSION,
        step=step,
        world_size=source.world_size,
        mesh={"dp": source.world_size},
        chunk_bytes=CHUNK_BYTES,
        parameters={name: _parameter(name, entry) for name, entry in source.parameter_table().items()},
        buffers={
            name: BufferRecord(shape=list(buffer.shape), dtype=dtype_name(buffer.dtype))
            for name, buffer in buffers.items()
        },
        files=[],
        slices=[],
        scalar_state=encode(scalar_state, "scalar_state"),
        client_state=encode(client_state, "client_state"),
        extra=encode(extra, "extra"),
    )


def _parameter(name: str, entry: ParameterDescription) -> ParameterRecord:
    try:
        memory_order(entry.shape, entry.stride)
        dtype = dtype_name(dtype_named(entry.dtype))
    except ValueError as error:
        raise ValueError(f"parameters[{name!r}]: {error}") from None
    return ParameterRecord(
        shape=list(entry.shape),
        stride=list(entry.stride),
        dtype=dtype,
        aliases=list(entry.aliases),
        trainable=entry.trainable,
    )


@dataclass(frozen=True)
class SaveJob:
    """Everything a save needs, fixed when it was asked for. ``manifest`` has no files and slices yet."""

    directory: CheckpointDirectory
    manifest: Manifest
    slices: Sequence[CheckpointSlice]
    consensus: RankConsensus
    keep_last: int | None
    timeout_seconds: float
    filesystem: Filesystem

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
        # Half the time: the other ranks wait for this one, and must not time out before it reports.
        held.enter_context(self.directory.locked(self.timeout_seconds / 2))
        held.enter_context(self._discarded_after_error())
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
        files: list[FileRecord] = []
        slices: list[SliceRecord] = []
        for shard in shards:
            file, records = json.loads(shard)
            files.append(FileRecord.model_validate(file))
            slices.extend(SliceRecord.model_validate(record) for record in records)
        manifest = self.manifest.model_copy(update={"files": files, "slices": slices})
        check_cover(manifest)
        check_disjoint_bytes(manifest)
        path = self.directory.saving(manifest.step)
        self.filesystem.write_file(path / MANIFEST_NAME, encode_manifest(manifest))
        self.filesystem.sync_directory(path)
        self.directory.commit(self.filesystem, manifest.step)
        if self.keep_last is None:
            return
        try:
            self.directory.prune(self.filesystem, self.keep_last, manifest.step)
        except OSError as error:
            warnings.warn(
                f"{step_name(manifest.step)} is saved, but an older one could not be removed: {error}",
                RuntimeWarning,
                stacklevel=2,
            )

    @contextlib.contextmanager
    def _discarded_after_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            # The first error is raised. The next save removes what this cannot.
            with contextlib.suppress(OSError):
                self.directory.discard(self.filesystem, self.manifest.step)
            raise

    def fingerprint(self) -> dict[str, Any]:
        """Return what all ranks must have in common: short values as they are, long ones as checksums."""
        tables = self.manifest.model_dump(include={"parameters", "buffers"})
        long = {"the parameter table": tables["parameters"], "the buffer table": tables["buffers"]}
        long |= {f"scalar_state[{key!r}]": value for key, value in self.manifest.scalar_state.items()}
        sums = {f"checksum of {name}": checksum(json.dumps(value).encode()) for name, value in long.items()}
        return {"step": self.manifest.step, "keep_last": self.keep_last, **sums}
