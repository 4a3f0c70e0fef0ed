"""Lightning's checkpoints as folders: the engine's own format, with Lightning's state in its manifest."""

from __future__ import annotations

import enum
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import nn

from zero_ext.checkpoint import loading, saving
from zero_ext.checkpoint.api import load_checkpoint, save_checkpoint
from zero_ext.checkpoint.files import CheckpointError
from zero_ext.checkpoint.format.json_state import decode
from zero_ext.checkpoint.format.state_source import MASTER
from zero_ext.checkpoint.inspection import open_checkpoint
from zero_ext.zero.api.engine_lookup import checkpoint_sources, engine_of
from zero_ext.zero.api.engine_state import EngineState, StateSlice
from zero_ext.zero.engine import Engine

_LIGHTNING = "lightning"
# What Lightning's dictionary holds of parameters and optimizers: the shards' business.
_STREAMED = ("state_dict", "optimizer_states")


def save(folder: Path, module: nn.Module, checkpoint: Mapping[str, Any]) -> None:
    """Save ``module`` and the dictionary that Lightning made of everything else as ``folder``; a collective.

    Without ``optimizer_states`` in the dictionary (``save_weights_only``) no optimizer state is saved. An
    older checkpoint in the folder goes once this one is whole. Raises ``ValueError`` and ``TypeError`` naming
    the key of what cannot be stored, ``CheckpointError`` for all else.
    """
    extra = list(checkpoint["state_dict"])
    if extra:
        raise ValueError(
            f"checkpoint['state_dict']: expected nothing from on_save_checkpoint, got {extra[:3]}: sharded "
            "parameters never pass through it. Put them under a key of their own, or register a buffer."
        )
    rest = {key: _plain(value) for key, value in checkpoint.items() if key not in _STREAMED}
    state = {_LIGHTNING: rest}
    step = int(checkpoint["global_step"])
    if "optimizer_states" in checkpoint:
        save_checkpoint(folder, module, step=step, client_state=state, keep_last=1, async_save=False)
        return
    engine = engine_of(module)
    engine.finish_updates()
    saving.save_state(folder, WeightsAlone(engine), step=step, client_state=state, keep_last=1)


def load(folder: Path, module: nn.Module, training: bool) -> dict[str, Any]:
    """Fill the prepared ``module`` from ``folder`` and return Lightning's dictionary; a collective.

    Saved at any world size and stage. Only in ``training`` with its optimizer's state. Raises ``ValueError``
    or ``CheckpointError``, with nothing changed, for what is no checkpoint of a ``ZeroStrategy``, is damaged
    or of another model.
    """
    state = _lightning_state(folder)
    engine = engine_of(module)
    if training:
        if "optimizer_states" not in state:
            raise ValueError(
                f"{folder}: expected a checkpoint with optimizer state, got weights only "
                "(save_weights_only=True). Resume from a whole checkpoint."
            )
        load_checkpoint(folder, module)
    else:
        engine.finish_updates(replaced=True)
        loading.load_state(folder, WeightsAlone(engine))
    return {"state_dict": {}, **state}


def remove(folder: Path) -> None:
    """Remove a checkpoint; nothing happens if there is none."""
    if folder.is_symlink() or folder.is_file():
        folder.unlink(missing_ok=True)
        return
    if folder.is_dir():
        # What is half removed must not pass for a checkpoint: it loses its name first.
        doomed = folder.with_name(f".removed-{folder.name}")
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed)


class WeightsAlone(EngineState):
    """The state of an engine without its optimizer's: what ``save_weights_only`` stores, and what evaluation
    loads."""

    trains = False

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, checkpoint_sources(engine).own.group, None)

    def save_slices(self) -> Iterator[StateSlice]:
        """Return this rank's shard of the weights."""
        return (each for each in super().save_slices() if each.kind == MASTER)

    def load_slices(self) -> Iterator[StateSlice]:
        """Return the weights that this rank needs."""
        return (each for each in super().load_slices() if each.kind == MASTER)

    def prepare_load(self, kinds: Mapping[str, tuple[str, ...]]) -> None:
        """Make no state of the optimizer."""

    def scalar_state(self) -> dict[str, Any]:
        """Return the engine's, without an optimizer."""
        return {**super().scalar_state(), "optimizer": None, "param_groups": []}

    def load_scalar_state(self, state: dict[str, Any]) -> None:
        """Load nothing: steps and loss scale belong to the training."""


def _lightning_state(folder: Path) -> dict[str, Any]:
    if folder.is_file():
        raise ValueError(
            f"{folder}: is a file that another strategy wrote by pickle, which is never read here. Load its "
            "weights into the LightningModule with that strategy's tools before fit, and start without "
            "ckpt_path."
        )
    _, manifest = open_checkpoint(folder)
    try:
        state = decode(manifest.client_state, "client_state")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder}: {error}") from error
    found = state.get(_LIGHTNING) if isinstance(state, dict) else None
    if not isinstance(found, dict):
        raise ValueError(
            f"{folder}: expected a checkpoint of a ZeroStrategy, got one without Lightning's state. Load it "
            "with zero_ext.load_checkpoint(folder, module) in on_fit_start instead of ckpt_path."
        )
    if manifest.scalar_state.get("optimizer") is not None:
        found["optimizer_states"] = []
    return found


def _plain(value: Any) -> Any:
    """``value`` with the types that a checkpoint stores in the place of their relatives."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, enum.Enum):
        return _plain(value.value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    return value
