"""The Trainer's checkpoint folders: what zero_ext puts into them, and taking it out again."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path

from torch import nn

from zero_ext.checkpoint.files import CheckpointError, read_limited
from zero_ext.checkpoint.format.tensor_files import find_weights
from zero_ext.checkpoint.inspection import open_checkpoint

# Inside a folder "checkpoint-N" of the Trainer: masters, moments, schedule, of all ranks.
STATE_FOLDER = "zero_ext"
_FOLDER = re.compile(r"checkpoint-(\d+)")
TRAINER_STATE = "trainer_state.json"
_FOREIGN = ("optimizer.pt", "optimizer.bin", "latest", "pytorch_model_fsdp_0")
_MOST_SHOWN = 5
_LARGEST_CONFIG = 16 << 20
logger = logging.getLogger("zero_ext")


def last_complete_checkpoint(output_dir: str) -> str:
    """Return the newest checkpoint in ``output_dir`` that was written to its end, else ``ValueError``."""
    root = Path(output_dir)
    folders = {
        int(match[1]): path
        for path in root.glob("checkpoint-*")
        if path.is_dir() and (match := _FOLDER.fullmatch(path.name))
    }
    for _, path in sorted(folders.items(), reverse=True):
        # The Trainer writes this file last.
        if (path / TRAINER_STATE).is_file():
            return str(path)
        logger.warning("%s was not written to its end and is passed over", path)
    raise ValueError(f"{root}: no complete checkpoint to resume from. Train without resume_from_checkpoint.")


def check_resume(folder: str, model: nn.Module) -> None:
    """Refuse a checkpoint that is not one, is damaged, or is of another model, before anything changes.

    Raises ``ValueError`` naming what differs, ``CheckpointError`` for damage.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(f"{folder}: no such checkpoint folder to resume from. Check the path.")
    if not (path / TRAINER_STATE).is_file():
        raise ValueError(
            f"{folder}: expected a complete Trainer checkpoint, got no {TRAINER_STATE}. Resume from "
            "another one."
        )
    _check_architecture(path, model)
    if (path / STATE_FOLDER).is_dir():
        parameters = stored_parameters(path / STATE_FOLDER)
        _check_parameters(
            {name: shape for names, shape in parameters.items() for name in names}, model, folder
        )
        return
    foreign = [name for name in _FOREIGN if (path / name).exists()]
    if foreign:
        raise ValueError(
            f"{folder}: was saved by another kind of trainer ('{foreign[0]}' is there, '{STATE_FOLDER}/' is "
            "not), and that optimizer state cannot be loaded into shards. Start from its weights: load the "
            f"model with from_pretrained({folder!r}) and call train() without resume_from_checkpoint."
        )
    tensors = find_weights(path).tensors
    _check_parameters({name: tensor.entry.shape for name, (_, tensor) in tensors.items()}, model, folder)


def stored_parameters(folder: Path) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Return the shapes of the parameters in a checkpoint of the engine, each by all of its names."""
    _, manifest = open_checkpoint(folder)
    return {(name, *entry.aliases): tuple(entry.shape) for name, entry in manifest.parameters.items()}


def _check_architecture(path: Path, model: nn.Module) -> None:
    config = getattr(model, "config", None)
    file = path / "config.json"
    if config is None or not file.is_file():
        return
    try:
        saved = json.loads(read_limited(file, _LARGEST_CONFIG))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file}: expected a model's configuration, got: {error}. Resume from another checkpoint."
        ) from error
    kind = saved.get("model_type") if isinstance(saved, dict) else None
    if kind is not None and kind != getattr(config, "model_type", kind):
        raise ValueError(
            f"{os.fspath(path)}: expected a checkpoint of a '{config.model_type}' model, got one of "
            f"'{kind}'. Nothing was changed. Resume with that model."
        )


def _check_parameters(stored: Mapping[str, tuple[int, ...]], model: nn.Module, folder: str) -> None:
    problems = []
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for parameter, own in names.items():
        found = next((name for name in own if name in stored), None)
        if found is None:
            problems.append(f"'{own[0]}' is missing")
        elif (shape := tuple(stored[found])) != tuple(parameter.shape):
            problems.append(f"'{found}' has shape {shape}, the model's {tuple(parameter.shape)}")
    if problems:
        shown = ", ".join(problems[:_MOST_SHOWN])
        left = len(problems) - _MOST_SHOWN
        more = f", and {left} more" if left > 0 else ""
        raise ValueError(
            f"{folder}: is a checkpoint of another model: {shown}{more}. Nothing was changed. Resume with "
            "the model that was trained there."
        )
