"""Imports a checkpoint of DeepSpeed's ZeRO stages 1 to 3 as one of zero_ext's."""

from __future__ import annotations

import contextlib
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_ext.checkpoint import CheckpointError
from zero_ext.checkpoint.files import Filesystem
from zero_ext.checkpoint.format.directory import LARGEST_STEP, CheckpointDirectory
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
    encode_manifest,
)
from zero_ext.checkpoint.format.tensor_files import dtype_name, row_major
from zero_ext.checkpoint.shard_file import saved_slices, write_shard
from zero_ext.integrations.deepspeed.checkpoint_io.checkpoint_fields import RankState, one_number
from zero_ext.integrations.deepspeed.checkpoint_io.checkpoint_folder import find_files, tag_folder
from zero_ext.integrations.deepspeed.checkpoint_io.checkpoint_pickle import verify_pickled
from zero_ext.integrations.deepspeed.checkpoint_io.checkpoint_source import (
    DeepSpeedCheckpoint,
    open_checkpoint,
)
from zero_ext.zero.api.engine_state import StateSlice

_LOCK_SECONDS = 60.0
_IMPORT_AGAIN = "Import it again."
_ADAM = ("Adam", "AdamW")
_ADAM_KINDS = {"exp_avg", "exp_avg_sq"}
# How torch runs a step, and where DeepSpeed counts them: not settings of the training.
_NO_SETTINGS = ("step", "bias_correction", "foreach", "fused", "capturable", "differentiable")
_COUNTERS = {"global_samples", "dp_world_size", "ds_version"}


@dataclass(frozen=True)
class ImportedCheckpoint:
    """The result of an import.

    Attributes:
        path: folder of the new checkpoint.
        source: folder of DeepSpeed's checkpoint.
        step: number of the checkpoint.
        stage: ZeRO stage of DeepSpeed's checkpoint.
        ranks: that saved it.
        optimizer: class of its optimizer.
        parameters: number of parameters.
        elements: of all parameters.
        bytes_written: bytes of the new files.
    """

    path: Path
    source: Path
    step: int
    stage: int
    ranks: int
    optimizer: str
    parameters: int
    elements: int
    bytes_written: int


def import_deepspeed_checkpoint(
    folder: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    tag: str | None = None,
    optimizer: str | None = None,
    verify: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> ImportedCheckpoint:
    """Write a DeepSpeed checkpoint as zero_ext's `output/step-000123`.

    [`load_checkpoint`][zero_ext.load_checkpoint] then resumes at any world size and stage: fp32 masters,
    optimizer state, step counts, settings of the param groups, loss scaler, frozen parameters and buffers are
    DeepSpeed's, bit for bit. The scheduler's state is what `load_checkpoint(..., scheduler=)` restores,
    DeepSpeed's client state the `client_state`.

    No code from the files runs: a class or function that is pickled in them is refused by name. In memory are
    the tables and a few MiB; tensors are mapped from one rank's file at a time. An error while writing
    removes what was written.

    Args:
        folder: what DeepSpeed's `save_checkpoint` was given, or the folder of a tag itself.
        output: holds the new checkpoint.
        tag: default what DeepSpeed's file `latest` says.
        optimizer: name of the class that the model will be prepared with, where the checkpoint does not say
            it.
        verify: read every file once more beforehand to compare its checksums.
        progress: called with ranks done and ranks in all.

    Returns:
        What was written.

    Raises:
        CheckpointError: names the file and what is missing, damaged, foreign or does not add up.
        TypeError: a value of the client state is of a type that cannot be stored.
        ValueError: a value of the client state cannot be stored.
    """
    checkpoint = read_checkpoint(tag_folder(Path(folder).absolute(), tag), verify)
    scalars = scalar_state(checkpoint, optimizer)
    manifest = _manifest(checkpoint, scalars)
    root = Path(output).absolute()
    written = _write(checkpoint, manifest, root, progress)
    entries = checkpoint.parameters.values()
    return ImportedCheckpoint(
        path=CheckpointDirectory(root).committed(manifest.step),
        source=checkpoint.files.path,
        step=manifest.step,
        stage=checkpoint.first.file.zero_stage,
        ranks=checkpoint.world_size,
        optimizer=scalars["optimizer_class"],
        parameters=len(entries),
        elements=sum(math.prod(entry.shape) for entry in entries),
        bytes_written=sum(entry.bytes for entry in written.files),
    )


def read_checkpoint(folder: Path, verify: bool = True) -> DeepSpeedCheckpoint:
    """Return the tables of the checkpoint that DeepSpeed wrote to ``folder``, every file checked; errors as
    of :func:`import_deepspeed_checkpoint`.
    """
    files = find_files(folder)
    if verify:
        for path in (*files.optimizer, *files.model):
            verify_pickled(path)
    return open_checkpoint(files)


def _manifest(checkpoint: DeepSpeedCheckpoint, scalars: dict[str, Any]) -> Manifest:
    """Return the manifest without files and slices."""
    model, step = checkpoint.model, checkpoint.model.global_steps
    if step >= LARGEST_STEP:
        raise CheckpointError(
            f"{checkpoint.files.path}: expected at most step {LARGEST_STEP - 1}, got {step}. Use another "
            "checkpoint."
        )
    extra: dict[str, Any] = {"deepspeed": model.model_dump(include=_COUNTERS)}
    if model.lr_scheduler is not None:
        extra["scheduler"] = model.lr_scheduler
    parameters = {
        name: ParameterRecord(
            shape=list(entry.shape),
            stride=list(row_major(entry.shape)),
            dtype=dtype_name(entry.dtype),
            aliases=list(checkpoint.aliases.get(name, ())),
            trainable=entry.group is not None,
        )
        for name, entry in checkpoint.parameters.items()
    }
    buffers = {
        name: BufferRecord(shape=list(buffer.shape), dtype=dtype_name(buffer.dtype))
        for name, buffer in checkpoint.buffers.items()
    }
    return Manifest(
        format=FORMAT,
        version=VERSION,
        step=step,
        world_size=checkpoint.world_size,
        mesh={"dp": checkpoint.world_size},
        chunk_bytes=CHUNK_BYTES,
        parameters=parameters,
        buffers=buffers,
        files=[],
        slices=[],
        scalar_state=encode(scalars, "scalar_state"),
        client_state=encode(checkpoint.client_state, "client_state"),
        extra=encode(extra, "extra"),
    )


def _write(
    checkpoint: DeepSpeedCheckpoint,
    manifest: Manifest,
    root: Path,
    progress: Callable[[int, int], None] | None,
) -> Manifest:
    """Write ``root/step-...``, a file for each rank, and returns the manifest with its files and slices.

    Nothing remains of it after an error; OSError and CheckpointError name the file.
    """
    directory, filesystem = CheckpointDirectory(root), Filesystem()
    filesystem.make_directory(root)
    with directory.locked(_LOCK_SECONDS):
        directory.clean(filesystem)
        folder = directory.saving(manifest.step)
        try:
            filesystem.make_directory(folder)
            files: list[FileRecord] = []
            records: list[SliceRecord] = []
            for rank in range(checkpoint.world_size):
                owned = saved_slices(_slices(checkpoint, rank), checkpoint.buffers if rank == 0 else {})
                file, written = write_shard(filesystem, folder, rank, owned)
                files.append(file)
                records += written
                if progress is not None:
                    progress(rank + 1, checkpoint.world_size)
            complete = manifest.model_copy(update={"files": files, "slices": records})
            try:
                check_cover(complete, _IMPORT_AGAIN)
                check_disjoint_bytes(complete, _IMPORT_AGAIN)
            except ValueError as error:
                raise CheckpointError(
                    f"{checkpoint.files.path}: it changed while it was read. Keep others from writing to "
                    f"it. {error}"
                ) from None
            filesystem.write_file(folder / MANIFEST_NAME, encode_manifest(complete))
            filesystem.sync_directory(folder)
            directory.commit(filesystem, manifest.step)
        except BaseException:
            with contextlib.suppress(OSError):
                directory.discard(filesystem, manifest.step)
            raise
    return complete


def _slices(checkpoint: DeepSpeedCheckpoint, rank: int) -> Iterator[StateSlice]:
    tensors = checkpoint.rank(rank)
    for name, entry in checkpoint.parameters.items():
        for fragment in entry.fragments:
            for kind, values in tensors.state_of(name, entry, fragment) if fragment.rank == rank else ():
                yield StateSlice(kind, name, fragment.start, values)


def scalar_state(checkpoint: DeepSpeedCheckpoint, optimizer: str | None) -> dict[str, Any]:
    """Return the ``scalar_state`` of a zero_ext checkpoint for the class ``optimizer``, by default the one
    that the checkpoint names. CheckpointError or ValueError if that is unknown or its state incomplete.
    """
    first = checkpoint.first
    known = optimizer or _optimizer_class(checkpoint)
    names: list[list[str]] = [[] for _ in first.groups]
    for name, _, group in checkpoint.trained():
        names[group].append(name)
    return {
        "steps": checkpoint.model.global_steps,
        "skipped_steps": checkpoint.model.skipped_steps,
        "loss_scaler": _scaler(first),
        "param_groups": [
            {"settings": _settings(first, number), "params": held} for number, held in enumerate(names)
        ],
        "optimizer_class": known,
        "optimizer": _per_parameter(checkpoint, known),
    }


def _optimizer_class(checkpoint: DeepSpeedCheckpoint) -> str:
    """Adam or AdamW: from torch's own groups, else from the optimizer that the configuration names."""
    marks = {group.get("decoupled_weight_decay") for group in checkpoint.first.groups}
    if marks in ({True}, {False}):
        return "AdamW" if marks == {True} else "Adam"
    kind = checkpoint.model.configured("optimizer", "type")
    if isinstance(kind, str) and kind.lower() in ("adam", "adamw"):
        coupled = checkpoint.model.configured("optimizer", "params", "adam_w_mode") is False
        return "Adam" if kind.lower() == "adam" and coupled else "AdamW"
    kinds = sorted({key for moments in checkpoint.first.moments for key in moments})
    raise CheckpointError(
        f"{checkpoint.first.path}: expected the class of its optimizer, got none (its state is {kinds}, the "
        f"configuration names {kind!r:.80}). Pass optimizer='AdamW', or the class that you will prepare with."
    )


def _settings(first: RankState, number: int) -> dict[str, Any]:
    group = first.groups[number]
    if group.get("bias_correction", True) is not True:
        raise CheckpointError(
            f"{first.path}: param group {number}: expected bias_correction, got "
            f"{group['bias_correction']!r}. Use DeepSpeed: Adam without bias correction is not supported."
        )
    found = {}
    for key, value in group.items():
        if key in _NO_SETTINGS:
            continue
        value = list(value) if isinstance(value, tuple) else value
        number_of = one_number(value)
        plain = value is None or isinstance(value, bool | str) or number_of is not None
        if not plain and not (
            isinstance(value, list) and all(one_number(each) is not None for each in value)
        ):
            raise CheckpointError(
                f"{first.path}: param group {number}: expected a setting for {key}, got {value!r:.80}. Use "
                "another checkpoint."
            )
        found[key] = value if number_of is None else number_of
    return found


def _per_parameter(checkpoint: DeepSpeedCheckpoint, optimizer: str) -> dict[str, Any]:
    """Return what each parameter's optimizer state holds besides its tensors, as zero_ext's steppers
    keep it.
    """
    first = checkpoint.first
    fused = optimizer in _ADAM and not any(group.get("amsgrad") for group in first.groups)
    steps: dict[str, int] = {}
    others: dict[str, Any] = defaultdict(dict)
    first_flats = {group: flat for flat, group in reversed(list(enumerate(first.flat_groups)))}
    for name, entry, group in checkpoint.trained():
        flat = entry.fragments[0].flat if entry.fragments else first_flats[group]
        scalars = first.scalars[flat]
        if not fused:
            zero_dim = ["step"] if "step" in scalars else []
            others[name] = {"scalars": dict(scalars), "zero_dim": zero_dim}
            continue
        if set(first.moments[flat]) != _ADAM_KINDS:
            raise CheckpointError(
                f"{first.path}: {name!r}: expected the state {sorted(_ADAM_KINDS)} of {optimizer}, got "
                f"{sorted(first.moments[flat])}. Pass the optimizer that it was saved with."
            )
        count = one_number(scalars.get("step", first.groups[group].get("step")))
        if count is None or count != int(count) or count < 0:
            raise CheckpointError(
                f"{first.path}: {name!r}: expected a step from 0, got {count!r}. Use another checkpoint."
            )
        steps[name] = int(count)
    return {"step": steps} if fused else dict(others)


def _scaler(first: RankState) -> dict[str, Any]:
    """Return the loss scaler. DeepSpeed notes when the last overflow was, zero_ext how many steps ago."""
    saved = {} if first.file.loss_scaler is None else vars(first.file.loss_scaler)
    numbers = {
        "scale": one_number(saved.get("cur_scale", 1.0)),
        "hysteresis": one_number(saved.get("cur_hysteresis", 1)),
        "iteration": one_number(saved.get("cur_iter", 0)),
        "overflow": one_number(saved.get("last_overflow_iter", -1)),
    }
    for key, value in numbers.items():
        if value is None or value != value or abs(value) == float("inf"):
            raise CheckpointError(
                f"{first.path}: loss_scaler: expected a number for {key}, got {value!r}. Use another "
                "checkpoint."
            )
    clean = int(numbers["iteration"] or 0) - int(numbers["overflow"] or 0) - 1
    scale, hysteresis = float(numbers["scale"] or 0), int(numbers["hysteresis"] or 0)
    if scale <= 0 or hysteresis < 1 or clean < 0:
        raise CheckpointError(
            f"{first.path}: loss_scaler: expected a scale above 0, hysteresis from 1 and steps since the "
            f"last overflow from 0, got {scale}, {hysteresis} and {clean}. Use another checkpoint."
        )
    return {"scale": scale, "hysteresis": hysteresis, "clean_steps": clean}
