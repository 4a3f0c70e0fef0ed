"""Checkpoints under DeepSpeed's names: ``save_dir/global_step{N}`` and a file ``latest`` with the newest tag.

Each tag is a directory of zero_ext checkpoints with one step in it, so it is written, committed and checked
as all of them are. Once it is committed, DeepSpeed's scripts that convert weights are put next to it, and
``latest`` is replaced.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from zero_ext.checkpoint.api import load_checkpoint, save_checkpoint
from zero_ext.checkpoint.files import Filesystem
from zero_ext.checkpoint.format.json_state import encode
from zero_ext.checkpoint.weights.hf_export import write_file
from zero_ext.integrations.deepspeed.checkpoint_io.checkpoint_folder import (
    CLIENT_STATE,
    LATEST,
    is_tag,
    tag_folder,
)
from zero_ext.integrations.deepspeed.checkpoint_io.checkpoint_weights import SCRIPT, SCRIPT_NAMES
from zero_ext.zero.api.engine_lookup import checkpoint_sources, engine_of
from zero_ext.zero.construction.rank_consistency import bytes_of_all_ranks
from zero_ext.zero.engine import Engine
from zero_ext.zero.units.collective_errors import raise_on_all_ranks

_LONGEST_TAG = 200
_COUNTERS = "counters"


class EngineExtras(NamedTuple):
    """The content of a DeepSpeed engine's checkpoint besides the model and its optimizer."""

    scheduler: Any
    loader: Any
    counters: dict[str, int]


def save(
    model: nn.Module,
    root: Path,
    tag: str,
    client_state: Mapping[str, Any],
    save_latest: bool,
    extras: EngineExtras,
) -> None:
    """Save ``model`` as ``root/tag``; a collective.

    ``TypeError`` naming the key for a client state that is neither JSON nor a tensor, ``ValueError`` for a
    tag that is no file name, both before anything is written.
    """
    name = _checked(tag)
    if not isinstance(client_state, Mapping):
        raise TypeError(f"client_state: expected a mapping, got {type(client_state).__name__}. Pass a dict.")
    encode(dict(client_state), "client_state")
    saved = save_checkpoint(
        root / name,
        model,
        scheduler=_stateful(extras.scheduler),
        loader=extras.loader,
        client_state={CLIENT_STATE: dict(client_state), _COUNTERS: extras.counters},
        async_save=False,
        keep_last=1,
    )
    root = saved.path.parents[1]  # rank 0's
    files = dict.fromkeys(SCRIPT_NAMES, SCRIPT) | ({LATEST: name} if save_latest else {})
    everyone = checkpoint_sources(engine_of(model)).full.everyone
    raise_on_all_ranks(
        everyone,
        lambda: _write_beside(root, files) if everyone.rank == 0 else None,
        f"writing to {root}",
        f"The checkpoint {name} itself is whole.",
    )


def load(
    model: nn.Module, root: Path, tag: object, scheduler: Any, loader: Any, optimizer: bool = True
) -> tuple[str | None, dict[str, Any], dict[str, int]]:
    """Load ``root/tag``, by default the one that ``latest`` names, with the optimizer's state if
    ``optimizer``; its path, client state and counters. A collective.

    (None, {}, {}) without a tag where there is no ``latest``. ``CheckpointError`` for anything missing,
    damaged or foreign; nothing has changed then. Where ranks name different folders, rank 0's is taken, as in
    :func:`save`.
    """
    root = _of_rank_0(model, root.absolute())
    if tag is None and not (root / LATEST).is_file():
        return None, {}, {}
    path = tag_folder(root, None if tag is None else str(tag))
    loaded = load_checkpoint(path, model, scheduler=_stateful(scheduler), loader=loader, optimizer=optimizer)
    state = loaded.client_state if isinstance(loaded.client_state, dict) else {}
    counters = state.get(_COUNTERS, {})
    numbers = {key: int(value) for key, value in counters.items()}
    return str(path), dict(state.get(CLIENT_STATE, {})), numbers


def _of_rank_0(model: nn.Module, path: Path) -> Path:
    everyone = checkpoint_sources(engine_of(model)).full.everyone
    return Path(os.fsdecode(bytes_of_all_ranks(everyone, os.fsencode(path), "load_checkpoint")[0]))


def _stateful(scheduler: Any) -> Any:
    """Return the scheduler, if it has a state to be saved."""
    return scheduler if hasattr(scheduler, "state_dict") else None


def _checked(tag: str) -> str:
    if not is_tag(tag) or len(tag) > _LONGEST_TAG or tag == LATEST or tag.startswith("."):
        raise ValueError(
            f"tag: expected a folder name of at most {_LONGEST_TAG} characters without slashes, not "
            f"beginning with a dot and not {LATEST!r}, got {tag!r}. Choose another."
        )
    return tag


def _write_beside(root: Path, files: Mapping[str, str]) -> None:
    """Each file is replaced whole, in this order."""
    filesystem = Filesystem()
    for name, content in files.items():
        new = root / f".{name}"
        filesystem.remove(new)
        filesystem.write_file(new, content.encode())
        new.chmod(0o755 if content.startswith("#!") else 0o644)
        filesystem.rename(new, root / name)
    filesystem.sync_directory(root)


def write_weights(engine: Engine, values: Mapping[str, torch.Tensor] | None, path: Path) -> None:
    """Write ``values``, which rank 0 has, to ``path``: whole or not at all, and an error on all ranks if it
    fails; a collective. The suffix ``.safetensors`` chooses the format."""
    raise_on_all_ranks(
        engine.collectives, lambda: _write(values, path) if values is not None else None, f"writing {path}"
    )


def _write(values: Mapping[str, torch.Tensor], path: Path) -> None:
    filesystem = Filesystem()
    filesystem.make_directory(path.parent.absolute())
    partial = path.with_name(f".partial-{path.name}")
    try:
        write_file(filesystem, partial, values, pickled=path.suffix != ".safetensors")
        filesystem.rename(partial, path)
    finally:
        filesystem.remove(partial)
