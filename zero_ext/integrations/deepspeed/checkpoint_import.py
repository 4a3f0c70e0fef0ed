"""Imports a checkpoint of DeepSpeed's ZeRO stages 1 to 3 as one of zero_ext's."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_ext.checkpoint import CheckpointError
from zero_ext.checkpoint.directory import LARGEST_STEP, CheckpointDirectory
from zero_ext.checkpoint.named_state import encode
from zero_ext.integrations.deepspeed.checkpoint_folder import find_files
from zero_ext.integrations.deepspeed.checkpoint_pickle import verify_pickled
from zero_ext.integrations.deepspeed.checkpoint_scalars import scalar_state
from zero_ext.integrations.deepspeed.checkpoint_source import DeepSpeedCheckpoint, open_checkpoint
from zero_ext.integrations.deepspeed.checkpoint_write import weights_manifest, write_checkpoint

_COUNTERS = ("global_samples", "dp_world_size", "ds_version")


@dataclass(frozen=True)
class ImportedCheckpoint:
    """What an import has made: ``path``, the checkpoint of ``step``, from ``source``, which ``ranks`` ranks
    saved at ``stage``; the class of its optimizer, the number of its parameters and of their elements, and
    the bytes written."""

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
    """Writes the DeepSpeed checkpoint ``folder/tag`` as zero_ext's ``output/step-000123``.

    ``folder`` is what ``save_checkpoint`` of DeepSpeed was given, ``tag`` by default what its file ``latest``
    says; the folder of a tag itself will do too. ``zero_ext.load_checkpoint(output, model)`` then resumes at
    any world size and stage: fp32 masters, optimizer state, step counts, settings of the param groups, loss
    scaler, frozen parameters and buffers are DeepSpeed's, bit for bit. The scheduler's state is what
    ``load_checkpoint(..., scheduler=)`` restores, DeepSpeed's client state the ``client_state``.

    ``optimizer`` is the name of the class that the model will be prepared with, where the checkpoint does
    not tell it ("Adam" and "AdamW" it mostly does). ``verify`` reads every file once more beforehand to
    compare its checksums. ``progress`` is called with ranks done and ranks in all. In memory are the tables
    and a few MiB; tensors are mapped from one rank's file at a time.

    No code from the files runs: a class or function that is pickled in them is refused by name.
    CheckpointError names the file and what is missing, damaged, foreign or does not add up, TypeError or
    ValueError a part of the client state that cannot be stored; nothing has been written then. An error while
    writing removes what was written.
    """
    checkpoint = read_checkpoint(folder, tag, verify)
    scalars = scalar_state(checkpoint, optimizer)
    fields = checkpoint.fields
    step = step_of(checkpoint)
    extra: dict[str, Any] = {"deepspeed": {key: fields.values.get(key) for key in _COUNTERS}}
    scheduler = fields.optional("lr_scheduler", dict)
    if scheduler is not None:
        extra["scheduler"] = scheduler
    manifest = weights_manifest(checkpoint, step).model_copy(
        update={
            "scalar_state": encode(scalars, "scalar_state"),
            "client_state": encode(checkpoint.client_state(), "client_state"),
            "extra": encode(extra, "extra"),
        }
    )
    root = Path(output).absolute()
    written = write_checkpoint(checkpoint, manifest, root, progress=progress)
    entries = checkpoint.parameters.values()
    return ImportedCheckpoint(
        path=CheckpointDirectory(root).committed(step),
        source=checkpoint.files.path,
        step=step,
        stage=checkpoint.first.stage,
        ranks=checkpoint.world_size,
        optimizer=scalars["optimizer_class"],
        parameters=len(entries),
        elements=sum(math.prod(entry.shape) for entry in entries),
        bytes_written=sum(entry.bytes for entry in written.files),
    )


def read_checkpoint(
    folder: str | os.PathLike[str], tag: str | None, verify: bool = True
) -> DeepSpeedCheckpoint:
    """The tables of a DeepSpeed checkpoint, every file checked; errors as of
    :func:`import_deepspeed_checkpoint`."""
    files = find_files(folder, tag)
    if verify:
        for path in (*files.optimizer, *files.model):
            verify_pickled(path)
    return open_checkpoint(files)


def step_of(checkpoint: DeepSpeedCheckpoint) -> int:
    """The step that the checkpoint is of."""
    step = checkpoint.fields.count("global_steps")
    if step >= LARGEST_STEP:
        raise CheckpointError(
            f"{checkpoint.fields.path}: global_steps is {step}, more than {LARGEST_STEP - 1}"
        )
    return step
