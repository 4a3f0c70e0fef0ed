"""What PyTorch and DeepSpeed save and load checkpoints with, flushed to the disk."""

import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

Tensors = dict[str, Tensor]
Access = Callable[[Path, Tensors], None]


def files_of(path: Path) -> list[Path]:
    """Return a file, or all files of a folder."""
    return [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]


def flush(path: Path) -> None:
    """Wait until a file, or all files of a folder, are on the disk."""
    for file in files_of(path):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())


def discard(path: Path) -> None:
    """Remove what a peer saved, if anything."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def _torch_save(path: Path, tensors: Tensors) -> None:
    torch.save(tensors, path)
    flush(path)


def _torch_load(mmap: bool) -> Access:
    def load(path: Path, tensors: Tensors) -> None:
        for name, value in torch.load(path, mmap=mmap, weights_only=True).items():
            tensors[name].copy_(value)

    return load


def _dcp_save(path: Path, tensors: Tensors) -> None:
    dcp.save(tensors, checkpoint_id=path, no_dist=True)
    flush(path)


def _dcp_load(path: Path, tensors: Tensors) -> None:
    dcp.load(tensors, checkpoint_id=path, no_dist=True)


def _deepspeed_engine() -> Any:
    from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

    return TorchCheckpointEngine()


def _deepspeed_save(path: Path, tensors: Tensors) -> None:
    _deepspeed_engine().save(tensors, str(path))
    flush(path)


def _deepspeed_load(path: Path, tensors: Tensors) -> None:
    for name, value in _deepspeed_engine().load(str(path), map_location="cpu").items():
        tensors[name].copy_(value)


SAVES: dict[str, Access] = {
    "torch.save": _torch_save,
    "torch DCP": _dcp_save,
    "DeepSpeed": _deepspeed_save,
}
"""By peer: saves tensors at a path that does not exist."""

LOADS: dict[str, tuple[str, Access]] = {
    "torch.load": ("torch.save", _torch_load(mmap=False)),
    "torch.load, mapped": ("torch.save", _torch_load(mmap=True)),
    "torch DCP": ("torch DCP", _dcp_load),
    "DeepSpeed": ("DeepSpeed", _deepspeed_load),
}
"""By peer: who saved it, and what fills tensors from it."""


def start_dcp_save(path: Path, tensors: Tensors) -> Future[Any]:
    """Start DCP's background save and return what waits for its end."""
    found: Any = dcp.async_save(tensors, checkpoint_id=path, no_dist=True)
    return found if isinstance(found, Future) else found.upload_completion
