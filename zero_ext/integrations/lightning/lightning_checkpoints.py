"""Lightning's checkpoints as folders: the engine's own format, with Lightning's state in its manifest."""

from __future__ import annotations

import enum
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import nn

from zero_ext.checkpoint import saving
from zero_ext.checkpoint.api import load_checkpoint, save_checkpoint
from zero_ext.checkpoint.files import CheckpointError
from zero_ext.checkpoint.format.json_state import decode
from zero_ext.checkpoint.format.state_source import MASTER
from zero_ext.checkpoint.inspection import open_checkpoint
from zero_ext.zero.api.engine_lookup import checkpoint_sources, engine_of
from zero_ext.zero.api.engine_state import EngineState, ParameterInfo, StateSlice
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
    rest = {key: value for key, value in checkpoint.items() if key not in _STREAMED}
    trains = "optimizer_states" in checkpoint
    save_model(folder, module, {_LIGHTNING: rest}, trains, step=int(checkpoint["global_step"]))


def save_model(
    folder: Path,
    module: nn.Module,
    state: Mapping[str, Any],
    optimizer: bool,
    step: int | None = None,
    names: Collection[str] | None = None,
) -> None:
    """Save the prepared ``module``, with its ``optimizer`` or without, and ``state``; a collective.

    Without an optimizer ``names`` may select parameters and buffers. Errors as for :func:`save`.
    """
    client_state = _plain(state)
    if optimizer:
        save_checkpoint(folder, module, step=step, client_state=client_state, keep_last=1, async_save=False)
        return
    engine = engine_of(module)
    engine.finish_updates()
    weights = WeightsAlone(engine, names)
    saving.save_state(folder, weights, step=step, client_state=client_state, keep_last=1)


def load(folder: Path, module: nn.Module, training: bool) -> dict[str, Any]:
    """Fill the prepared ``module`` from ``folder`` and return Lightning's dictionary; a collective.

    Saved at any world size and stage. Only in ``training`` with its optimizer's state. Raises ``ValueError``
    or ``CheckpointError``, with nothing changed, for what is no checkpoint of a ``ZeroStrategy``, is damaged
    or of another model.
    """
    state, trains = read_state(folder, _LIGHTNING)
    if training and not trains:
        raise ValueError(
            f"{folder}: expected a checkpoint with optimizer state, got weights only "
            "(save_weights_only=True). Resume from a whole checkpoint."
        )
    load_checkpoint(folder, module, optimizer=training)
    return {"state_dict": {}, **state, **({"optimizer_states": []} if trains else {})}


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
    """An engine's state without its optimizer's, to be saved: all weights, or those in ``names``."""

    trains = False

    def __init__(self, engine: Engine, names: Collection[str] | None = None) -> None:
        super().__init__(engine, checkpoint_sources(engine).own.group, None)
        self._names = names

    def _selects(self, name: str) -> bool:
        return self._names is None or name in self._names

    def parameter_table(self) -> Mapping[str, ParameterInfo]:
        """Return the parameters by first name."""
        return {name: entry for name, entry in super().parameter_table().items() if self._selects(name)}

    def save_slices(self) -> Iterator[StateSlice]:
        """Return this rank's shard of the weights."""
        return (each for each in super().save_slices() if each.kind == MASTER and self._selects(each.name))

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """Return the module's persistent buffers."""
        return {name: buffer for name, buffer in super().buffers().items() if self._selects(name)}

    def scalar_state(self) -> dict[str, Any]:
        """Return the engine's, without an optimizer."""
        return {**super().scalar_state(), "optimizer": None, "param_groups": []}


def read_state(folder: Path, owner: str) -> tuple[dict[str, Any], bool]:
    """Return what :func:`save_model` stored under the name ``owner``, and whether with optimizer state.

    Raises ``ValueError`` for a file or a checkpoint of another owner, ``CheckpointError`` for a damaged one.
    """
    if folder.is_file():
        raise ValueError(
            f"{folder}: is a file that another strategy wrote by pickle, which is never read here. Load its "
            "weights into the module with that strategy's tools before it is sharded, and train from there."
        )
    _, manifest = open_checkpoint(folder)
    try:
        state = decode(manifest.client_state, "client_state")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder}: {error}") from error
    found = state.get(owner) if isinstance(state, dict) else None
    if not isinstance(found, dict):
        raise ValueError(
            f"{folder}: expected a checkpoint of a ZeroStrategy, got one without Lightning's state. Load it "
            "with zero_ext.load_checkpoint(folder, module)."
        )
    return found, manifest.scalar_state.get("optimizer") is not None


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
