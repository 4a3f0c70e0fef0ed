"""Saving: every rank writes its slices, all agree that every byte is on the disk, one rename commits."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zero_ext.checkpoint.files.checkpoint_error import brief
from zero_ext.checkpoint.files.filesystem import Filesystem
from zero_ext.checkpoint.format.directory import LARGEST_STEP, CheckpointDirectory
from zero_ext.checkpoint.format.dtypes import dtype_name, dtype_named
from zero_ext.checkpoint.format.json_state import encode
from zero_ext.checkpoint.format.manifest import (
    CHUNK_BYTES,
    FORMAT,
    VERSION,
    BufferRecord,
    Manifest,
    ParameterRecord,
)
from zero_ext.checkpoint.format.memory_order import memory_order
from zero_ext.checkpoint.format.state_source import ParameterDescription, StateSource
from zero_ext.checkpoint.rank_consensus import RankConsensus
from zero_ext.checkpoint.save_job import UNTOUCHED, SaveJob
from zero_ext.checkpoint.save_session import SaveHandle, session_of
from zero_ext.checkpoint.transfer.shard_file import saved_slices
from zero_ext.config.sections.training import TagValidation

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
    request = _Request(directory, step, client_state, keep_last, extra)
    group = session.group_of(source)
    consensus = RankConsensus(source.rank, source.world_size, group, f"saving to {directory}")
    jobs: list[SaveJob] = []

    def prepare() -> dict[str, Any]:
        session.finish_previous()
        jobs.append(_prepare(request, source, consensus))
        return {
            "directory": str(jobs[0].directory.root),
            "fingerprint": jobs[0].fingerprint(),
            "reads_stores": jobs[0].reads_stores,
        }

    answers = consensus.stage(prepare, UNTOUCHED)
    in_background = async_save and not any(answer["reads_stores"] for answer in answers)

    def check_and_stage() -> None:
        _check_same([answer["fingerprint"] for answer in answers])
        jobs[0] = _in_directory(jobs[0], answers[0]["directory"], tag_validation)
        if in_background:
            jobs[0] = jobs[0].staged()

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


class _Request(NamedTuple):
    """The arguments of ``save_state``, not yet checked."""

    directory: str | os.PathLike[str]
    step: int | None
    client_state: Any
    keep_last: int | None
    extra: dict[str, Any] | None


def _in_directory(job: SaveJob, root: str, validation: TagValidation) -> SaveJob:
    """Return the same save in ``root``, the directory of rank 0, which this rank may have been given another
    name of."""
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


def _prepare(request: _Request, source: StateSource, consensus: RankConsensus) -> SaveJob:
    if request.keep_last is not None and (type(request.keep_last) is not int or request.keep_last < 1):
        raise ValueError(
            f"keep_last: expected a whole number from 1, or None to keep all, got {request.keep_last!r}. "
            "Pass one of these."
        )
    buffers = source.buffers()
    manifest = _describe(request, source, buffers)
    slices = saved_slices(source.save_slices(), buffers if source.rank == 0 else {})
    return SaveJob(
        directory=CheckpointDirectory(Path(request.directory).absolute()),
        manifest=manifest,
        slices=slices,
        consensus=consensus,
        keep_last=request.keep_last,
        timeout_seconds=source.config.timeout_seconds,
        filesystem=Filesystem(),
    )


def _describe(request: _Request, source: StateSource, buffers: Mapping[str, torch.Tensor]) -> Manifest:
    scalar_state = source.scalar_state()
    step = scalar_state.get("steps") if request.step is None else request.step
    if type(step) is not int or not 0 <= step < LARGEST_STEP:
        raise ValueError(
            f"step: expected a whole number from 0 to {LARGEST_STEP - 1}, got {step!r}. Pass step= in this "
            "range."
        )
    extra = {} if request.extra is None else request.extra
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
        client_state=encode(request.client_state, "client_state"),
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
