"""The Trainer's checkpoint folders: what zero_ext puts into them, and taking it out again."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_ext.checkpoint.api import load_checkpoint, save_checkpoint
from zero_ext.checkpoint.files import CheckpointError, read_limited
from zero_ext.checkpoint.format.tensor_files import find_weights
from zero_ext.checkpoint.inspection import open_checkpoint
from zero_ext.checkpoint.weights.safetensors_load import load_safetensors

# Inside a folder "checkpoint-N" of the Trainer: masters, moments, schedule, of all ranks.
STATE_FOLDER = "zero_ext"
_FOLDER = re.compile(r"checkpoint-(\d+)")
_TRAINER_STATE = "trainer_state.json"
_FOREIGN = ("optimizer.pt", "optimizer.bin", "latest", "pytorch_model_fsdp_0")
_MOST_SHOWN = 5
_LARGEST_CONFIG = 16 << 20
logger = logging.getLogger("zero_ext")


def save_training(folder: str, model: nn.Module, scheduler: Any, step: int) -> None:
    """Add to the Trainer's checkpoint ``folder`` what resuming needs besides the weights; a collective."""
    save_checkpoint(Path(folder) / STATE_FOLDER, model, step=step, scheduler=scheduler, async_save=False)


def last_complete_checkpoint(output_dir: str) -> str:
    """Return the newest checkpoint in ``output_dir`` that was written to its end; ``ValueError``
    without one.
    """
    root = Path(output_dir)
    found = {}
    for path in root.iterdir() if root.is_dir() else ():
        match = _FOLDER.fullmatch(path.name)
        if match is not None and path.is_dir():
            found[int(match[1])] = path
    for step in sorted(found, reverse=True):
        # The Trainer writes this file last.
        if (found[step] / _TRAINER_STATE).is_file():
            return str(found[step])
        logger.warning("%s was not written to its end and is passed over", found[step])
    raise ValueError(f"{root}: no complete checkpoint to resume from. Train without resume_from_checkpoint.")


def check_resume(folder: str, model: nn.Module) -> None:
    """Refuse a checkpoint that is not one, is damaged, or is of another model, before anything changes.

    Raises ``ValueError`` naming what differs, ``CheckpointError`` for damage.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(f"{folder}: no such checkpoint folder to resume from. Check the path.")
    if not (path / _TRAINER_STATE).is_file():
        raise ValueError(
            f"{folder}: expected a complete Trainer checkpoint, got no {_TRAINER_STATE}. Resume from "
            "another one."
        )
    _check_architecture(path, model)
    if (path / STATE_FOLDER).is_dir():
        _, manifest = open_checkpoint(path / STATE_FOLDER)
        stored = {
            name: tuple(entry.shape)
            for first, entry in manifest.parameters.items()
            for name in (first, *entry.aliases)
        }
        _check_parameters(stored, model, folder)
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


def resume_training(folder: str, model: nn.Module, scheduler: Any) -> None:
    """Load a checkpoint into the sharded ``model``, its optimizer and ``scheduler``; a collective.

    One without optimizer state (``save_only_model``) gives weights only, with a warning.
    """
    if (Path(folder) / STATE_FOLDER).is_dir():
        load_checkpoint(Path(folder) / STATE_FOLDER, model, scheduler=scheduler)
        return
    logger.warning("%s holds weights only: optimizer and schedule start anew", folder)
    load_safetensors(model, folder, strict=False)


def load_best(folder: str, model: nn.Module) -> None:
    """Give the sharded ``model`` the weights of a checkpoint, with the state they were saved with if it is
    there; a collective. Random numbers go on as they were."""
    random = torch.get_rng_state()
    try:
        if (Path(folder) / STATE_FOLDER).is_dir():
            load_checkpoint(Path(folder) / STATE_FOLDER, model)
        else:
            load_safetensors(model, folder, strict=False)
    finally:
        torch.set_rng_state(random)


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
            f"'{kind}'. "
            "Nothing was changed. Resume with that model."
        )


def _check_parameters(stored: Mapping[str, tuple[int, ...]], model: nn.Module, folder: str) -> None:
    problems = []
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for parameter, own in names.items():
        found = [name for name in own if name in stored]
        if not found:
            problems.append(f"'{own[0]}' is missing")
        elif tuple(stored[found[0]]) != tuple(parameter.shape):
            shapes = f"{tuple(stored[found[0]])}, the model's {tuple(parameter.shape)}"
            problems.append(f"'{found[0]}' has shape {shapes}")
    if problems:
        shown = ", ".join(problems[:_MOST_SHOWN])
        left = len(problems) - _MOST_SHOWN
        more = f", and {left} more" if left > 0 else ""
        raise ValueError(
            f"{folder}: is a checkpoint of another model: {shown}{more}. Nothing was changed. Resume with "
            "the model that was trained there."
        )
