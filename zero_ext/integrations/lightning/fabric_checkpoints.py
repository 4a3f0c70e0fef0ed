"""Fabric's checkpoints: a folder with a checkpoint of each model, and other state in their manifests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

from torch import nn

from zero_ext.checkpoint.api import load_checkpoint
from zero_ext.checkpoint.files import CheckpointError
from zero_ext.checkpoint.inspection import holds_checkpoints
from zero_ext.integrations.lightning.lightning_checkpoints import read_state, remove, save_model
from zero_ext.integrations.load_weights import load_weights as load_weights
from zero_ext.zero.api.engine_lookup import engine_of
from zero_ext.zero.api.zero_optimizer import ZeroOptimizer

_FABRIC = "fabric"
Filters = Mapping[str, Callable[[str, Any], bool]]


def save(
    folder: Path,
    state: Mapping[str, Any],
    models: Mapping[str, nn.Module],
    filters: Filters,
    first_rank: bool,
    barrier: Callable[[], Any],
) -> None:
    """Save ``state``, with the prepared modules ``models`` that it names, as ``folder``; a collective."""
    optimizers = _optimizers(state, models)
    for key in models:
        if not key or PurePath(key).name != key or key.startswith("."):
            raise ValueError(f"state: expected names that a folder can have, got {key!r}. Rename the model.")
    if not models:
        raise ValueError(
            f"state: expected a model that was set up, got {sorted(state)}. Call fabric.setup first, and "
            "save other state without fabric.save."
        )
    for key in filters:
        if key in optimizers or key in optimizers.values():
            raise ValueError(
                f"filter: expected none for a model with an optimizer in the state, got one for {key!r}. "
                "Leave out the optimizer or the filter."
            )
    rest = {
        key: _filtered(_state_of(value), filters.get(key))
        for key, value in state.items()
        if key not in models and key not in optimizers
    }
    _check_replaceable(folder)
    record = {_FABRIC: {"state": rest, "optimizers": optimizers}}
    # What is there stays complete until all models are written, and then goes with all its folders.
    written = folder.with_name(f".saving-{folder.name}")
    if first_rank:
        remove(written)
    barrier()
    for key, module in models.items():
        selects = filters.get(key)
        names = (
            None
            if selects is None
            else {name for name, value in module.state_dict().items() if selects(name, value)}
        )
        save_model(written / key, module, record, key in optimizers.values(), names=names)
    barrier()
    if first_rank:
        remove(folder)
        written.rename(folder)


def _check_replaceable(folder: Path) -> None:
    """Raise ``ValueError`` if replacing ``folder`` would remove anything else than such a checkpoint."""
    if not folder.exists() and not folder.is_symlink():
        return
    try:
        inside = [path for path in folder.iterdir() if not path.name.startswith(".saving-")]
        for path in inside:
            read_state(path, _FABRIC)
    except (OSError, CheckpointError, ValueError) as error:
        raise ValueError(
            f"fabric.save: {folder}: expected no such folder, an empty one or a checkpoint of fabric.save to "
            f"replace, got something else ({error}). Choose another path."
        ) from error


def load(
    folder: Path, state: dict[str, Any], models: Mapping[str, nn.Module], strict: bool
) -> dict[str, Any]:
    """Load ``folder`` into ``state``, with its prepared ``models``, and return the rest; a collective.

    Every name is checked before anything is changed.
    """
    saved = (
        [path.name for path in sorted(folder.iterdir()) if holds_checkpoints(path)] if folder.is_dir() else []
    )
    if not saved and not folder.is_file():
        raise CheckpointError(f"{folder}: expected a folder of fabric.save, got none. Correct the path.")
    record, _ = read_state(folder / saved[0] if saved else folder, _FABRIC)
    rest, trained = dict(record["state"]), record["optimizers"]
    missing = sorted(state.keys() - {*saved, *rest, *trained})
    if strict and missing:
        raise ValueError(
            f"{folder}: expected {missing}, got {sorted({*saved, *rest, *trained})}. Load only these "
            "names, or pass strict=False."
        )
    others = sorted((state.keys() & saved) - models.keys())
    if others:
        raise ValueError(
            f"{folder}: {others}: expected models that were set up, got others. Set them up first."
        )
    models = {key: module for key, module in models.items() if key in saved}
    optimizers = _optimizers({key: value for key, value in state.items() if key in trained}, models)
    for key, module in models.items():
        if key in optimizers.values():
            load_checkpoint(folder / key, module)
        elif strict:
            load_checkpoint(folder / key, module, optimizer=False)
        else:
            load_weights(module, folder / key, strict=False)
    for key in state.keys() & rest.keys():
        value = rest.pop(key)
        if hasattr(state[key], "load_state_dict"):
            state[key].load_state_dict(value)
        else:
            state[key] = value
    return rest


def _optimizers(state: Mapping[str, Any], models: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return the name of the model of each prepared optimizer in ``state``."""
    owners = {engine_of(module): key for key, module in models.items()}
    found = {}
    for key, value in state.items():
        if isinstance(value, ZeroOptimizer):
            if value.engine not in owners:
                raise ValueError(
                    f"state: expected the model of the optimizer {key!r} as well, got {sorted(models)}. Add "
                    "the model, since shards of both are saved as one."
                )
            found[key] = owners[value.engine]
    return found


def _state_of(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value


def _filtered(value: Any, selects: Callable[[str, Any], bool] | None) -> Any:
    if selects is None or not isinstance(value, Mapping):
        return value
    return {key: item for key, item in value.items() if selects(key, item)}
