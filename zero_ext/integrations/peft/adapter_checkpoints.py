"""The Trainer's checkpoint folders of a model with adapters: no base model in them, and out of them again."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from zero_ext.checkpoint.api import load_checkpoint, save_checkpoint
from zero_ext.checkpoint.inspection import open_checkpoint
from zero_ext.integrations.peft.adapters import load_adapter_weights
from zero_ext.integrations.transformers.trainer_checkpoints import STATE_FOLDER

_TRAINER_STATE = "trainer_state.json"
_ADAPTER = "adapter_config.json"
logger = logging.getLogger("zero_ext")


def save_training(folder: str, model: PeftModel, scheduler: Any, step: int) -> None:
    """Add to the Trainer's checkpoint ``folder`` what resuming needs besides the adapter; a collective. The
    frozen base model is left out."""
    save_checkpoint(
        Path(folder) / STATE_FOLDER,
        model,
        step=step,
        scheduler=scheduler,
        async_save=False,
        include_frozen=False,
    )


def check_resume(folder: str, model: PeftModel) -> None:
    """Refuse a folder that is no whole checkpoint of these adapters, before anything changes: ``ValueError``
    names what differs, ``CheckpointError`` reports damage."""
    path = Path(folder)
    for name, meaning in ((_TRAINER_STATE, "a Trainer"), (_ADAPTER, "a model with adapters")):
        if not (path / name).is_file():
            raise ValueError(
                f"{folder}: expected a complete checkpoint of {meaning}, got no {name}. Resume from "
                "another one."
            )
    if not (path / STATE_FOLDER).is_dir():
        return
    _, manifest = open_checkpoint(path / STATE_FOLDER)
    stored = {
        name: tuple(entry.shape)
        for first, entry in manifest.parameters.items()
        for name in (first, *entry.aliases)
    }
    trained = {name: tuple(each.shape) for name, each in model.named_parameters() if each.requires_grad}
    problems = [
        f"'{name}' is {stored.get(name, 'missing')} there and {shape} in the model"
        for name, shape in trained.items()
        if stored.get(name) != shape
    ]
    problems += [f"'{name}' is not trained here" for name in manifest.parameters if name not in trained]
    if problems:
        raise ValueError(
            f"{folder}: is a checkpoint of other adapters: {', '.join(problems[:5])}. Nothing was changed. "
            "Resume with the peft_config that was trained there."
        )


def resume_training(folder: str, model: PeftModel, scheduler: Any) -> None:
    """Load a checkpoint into the adapters, their optimizer and ``scheduler``; a collective. One without
    optimizer state (``save_only_model``) gives weights only, with a warning."""
    if (Path(folder) / STATE_FOLDER).is_dir():
        load_checkpoint(Path(folder) / STATE_FOLDER, model, scheduler=scheduler, include_frozen=False)
        return
    logger.warning("%s holds weights only: optimizer and schedule start anew", folder)
    load_adapter_weights(model, folder)


def load_best(folder: str, model: PeftModel) -> None:
    """Give the adapters the weights of a checkpoint, with the state they were saved with if it is there; a
    collective. Random numbers go on as they were."""
    random = torch.get_rng_state()
    try:
        if (Path(folder) / STATE_FOLDER).is_dir():
            load_checkpoint(Path(folder) / STATE_FOLDER, model, include_frozen=False)
        else:
            load_adapter_weights(model, folder)
    finally:
        torch.set_rng_state(random)
