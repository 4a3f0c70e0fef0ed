"""Ray Train: checkpoints that all workers write straight into a run's storage, and resuming from them.

``zero_ext.prepare`` needs nothing of this: inside a ``TorchTrainer``'s loop it takes the process group that
Ray has started.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if find_spec("ray") is None:
    raise ImportError(
        "zero_ext.integrations.ray: the package ray[train] is not installed. Install it with "
        "pip install 'zero_ext[integrations]' or pip install 'ray[train]>=2.60'."
    )

import ray.train
from torch import nn

from zero_ext.checkpoint.api import Stateful, load_checkpoint, save_checkpoint
from zero_ext.checkpoint.loading import LoadedCheckpoint
from zero_ext.zero.api.engine_lookup import engine_of

__all__ = ["report", "resume"]


def report(
    metrics: Mapping[str, Any],
    model: nn.Module,
    *,
    scheduler: Stateful | None = None,
    loader: Stateful | None = None,
    client_state: Any = None,
) -> None:
    """Report metrics and a checkpoint of `model`, as `ray.train.report`; all workers call it.

    Every worker writes its shards into `storage_path/name/checkpoint-000123` (the number is that of the
    optimizer steps), nothing is copied or uploaded afterwards, and `CheckpointConfig(num_to_keep=...)`
    counts it.

    Args:
        metrics: as for `ray.train.report`.
        model: a prepared model.
        scheduler: as for [`save_checkpoint`][zero_ext.save_checkpoint].
        loader: as for `save_checkpoint`.
        client_state: as for `save_checkpoint`.

    Raises:
        ValueError: the run's storage is no directory that all workers see. Else as `save_checkpoint`.
    """
    storage = ray.train.get_context().get_storage()
    if storage.storage_filesystem.type_name != "local":
        raise ValueError(
            "RunConfig(storage_path=...): expected a directory that all workers see, got a file system of "
            f"type '{storage.storage_filesystem.type_name}'. Pass a directory, for example on NFS."
        )
    engine = engine_of(model)
    folder = Path(storage.experiment_fs_path) / f"checkpoint-{engine.steps:06d}"
    save_checkpoint(
        folder, model, scheduler=scheduler, loader=loader, client_state=client_state, async_save=False
    )
    ray.train.report(
        dict(metrics),
        checkpoint=ray.train.Checkpoint.from_directory(folder) if engine.rank == 0 else None,
        checkpoint_dir_name=folder.name,
        checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
    )


def resume(
    model: nn.Module, *, scheduler: Stateful | None = None, loader: Stateful | None = None
) -> LoadedCheckpoint | None:
    """Load the newest checkpoint that this run has reported, at any number of workers; all workers call it.

    Args:
        model: a prepared model.
        scheduler: as for [`load_checkpoint`][zero_ext.load_checkpoint].
        loader: as for `load_checkpoint`.

    Returns:
        Step and client state; None if the run has reported no checkpoint.
    """
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder:
        return load_checkpoint(folder, model, scheduler=scheduler, loader=loader)
