"""Checkpoints under DeepSpeed's names: ``save_dir/global_step{N}`` and a file ``latest`` with the newest tag.

Each tag is a directory of zero_ext checkpoints with one step in it, so it is written, committed and checked
as all of them are. ``latest`` is replaced, by a rename, once the checkpoint is committed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_ext.checkpoint import CheckpointError
from zero_ext.checkpoint.model import load_checkpoint, save_checkpoint
from zero_ext.checkpoint.named_state import encode
from zero_ext.checkpoint.storage import Storage
from zero_ext.zero.lookup import engine_of
from zero_ext.zero.together import together

if TYPE_CHECKING:
    from zero_ext.integrations.deepspeed.engine import DeepSpeedEngine

LATEST = "latest"
_NEW_LATEST = ".latest"
_LONGEST_TAG = 200
_TAG = re.compile(r"[^/\\\0\n]+")
_CLIENT, _COUNTERS = "client", "counters"


def save(
    engine: DeepSpeedEngine, root: Path, tag: object, client_state: Mapping[str, Any], save_latest: bool
) -> None:
    """Saves ``engine`` as ``root/tag``, by default ``global_step{N}``; a collective.

    ``TypeError`` naming the key for a client state that is neither JSON nor a tensor, ``ValueError`` for a
    tag that is no file name, both before anything is written.
    """
    name = f"global_step{engine.global_steps}" if tag is None else _checked(str(tag))
    if not isinstance(client_state, Mapping):
        raise TypeError(f"client_state: a mapping wanted, {type(client_state).__name__} given")
    encode(dict(client_state), "client_state")
    counters = {"micro_steps": engine.micro_steps, "samples": engine._unmanaged_samples}
    save_checkpoint(
        root / name,
        engine,
        scheduler=_stateful(engine.lr_scheduler),
        loader=engine.training_dataloader,
        client_state={_CLIENT: dict(client_state), _COUNTERS: counters},
        asynchronous=False,
        keep_last=1,
    )
    if save_latest:
        everyone = engine_of(engine).state.everyone
        together(
            everyone,
            lambda: _write_latest(root, name) if everyone.rank == 0 else None,
            f"writing {root / LATEST}",
            f"The checkpoint {name} itself is whole.",
        )


def load(
    engine: DeepSpeedEngine, root: Path, tag: object, with_scheduler: bool
) -> tuple[str | None, dict[str, Any]]:
    """Loads ``root/tag``, by default the one that ``latest`` names; its path and client state. A collective.

    (None, {}) without a tag where there is no ``latest``. ``CheckpointError`` for anything missing, damaged
    or foreign; nothing has changed then.
    """
    if tag is None:
        latest = root / LATEST
        if not latest.is_file():
            return None, {}
        tag = latest.read_text(encoding="utf-8").strip()
    path = root / _checked(str(tag))
    if not path.is_dir():
        there = ", ".join(sorted(item.name for item in root.glob("*/") if item.is_dir())) or "none"
        raise CheckpointError(f"{path}: no such checkpoint; there: {there}")
    loaded = load_checkpoint(
        path,
        engine,
        scheduler=_stateful(engine.lr_scheduler) if with_scheduler else None,
        loader=engine.training_dataloader,
    )
    state = loaded.client_state if isinstance(loaded.client_state, dict) else {}
    counters = state.get(_COUNTERS, {})
    engine.micro_steps = int(counters.get("micro_steps", 0))
    engine._unmanaged_samples = int(counters.get("samples", 0))
    return str(path), dict(state.get(_CLIENT, {}))


def _stateful(scheduler: Any) -> Any:
    """The scheduler, if it has a state to be saved."""
    return scheduler if hasattr(scheduler, "state_dict") else None


def _checked(tag: str) -> str:
    if (
        _TAG.fullmatch(tag) is None
        or len(tag) > _LONGEST_TAG
        or tag in (".", "..", LATEST)
        or tag.startswith(".")
    ):
        raise ValueError(
            f"tag {tag!r}: a plain folder name of at most {_LONGEST_TAG} characters wanted, no slashes, "
            f"not beginning with a dot and not {LATEST!r}"
        )
    return tag


def _write_latest(root: Path, name: str) -> None:
    storage = Storage()
    storage.write_file(root / _NEW_LATEST, name.encode())
    storage.rename(root / _NEW_LATEST, root / LATEST)
    storage.sync_directory(root)
