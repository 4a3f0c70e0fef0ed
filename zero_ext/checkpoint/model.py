"""Checkpoints of a prepared model with all that a resume needs: the calls users make."""

from __future__ import annotations

import os
from typing import Any, Protocol

import torch
from torch import nn

from zero_ext.checkpoint import load as loading
from zero_ext.checkpoint import save as saving
from zero_ext.checkpoint.load import LoadedCheckpoint
from zero_ext.checkpoint.session import SaveHandle
from zero_ext.zero.engine import Engine
from zero_ext.zero.lookup import engine_of


class Stateful(Protocol):
    """A scheduler, loader or the like."""

    def state_dict(self) -> dict[str, Any]:
        """Its state."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Restores it."""


def save_checkpoint(
    directory: str | os.PathLike[str],
    model: nn.Module,
    *,
    step: int | None = None,
    scheduler: Stateful | None = None,
    loader: Stateful | None = None,
    client_state: Any = None,
    asynchronous: bool | None = None,
    keep_last: int | None = None,
) -> SaveHandle:
    """Saves a prepared model with its optimizer as ``directory/step-000123``; all ranks call it together.

    ``scheduler``, ``loader`` (anything with ``state_dict``) and each rank's random state go along.
    ``asynchronous`` and ``keep_last`` default to the configuration's ``checkpoint`` section. Further
    arguments, guarantees and errors are those of :func:`zero_ext.checkpoint.save_checkpoint`.
    """
    engine = engine_of(model)
    extra: dict[str, Any] = {"random": _random_states(engine)}
    for name, part in (("scheduler", scheduler), ("loader", loader)):
        if part is not None:
            extra[name] = part.state_dict()
    policy = engine.config.checkpoint
    return saving.save_checkpoint(
        directory,
        engine.state,
        step=step,
        client_state=client_state,
        keep_last=policy.keep_last if keep_last is None else keep_last,
        asynchronous=policy.asynchronous if asynchronous is None else asynchronous,
        extra=extra,
    )


def load_checkpoint(
    directory: str | os.PathLike[str],
    model: nn.Module,
    *,
    step: int | None = None,
    scheduler: Stateful | None = None,
    loader: Stateful | None = None,
) -> LoadedCheckpoint:
    """Loads a checkpoint (default: the latest) into a prepared model; all ranks call it together.

    The checkpoint may come from any world size and stage. Random states are restored where the world size
    is the same. Raises ``ValueError`` if a ``scheduler`` or ``loader`` is given whose state was not saved,
    ``CheckpointError`` for anything missing, damaged or foreign, before the model changes.
    """
    engine = engine_of(model)
    loaded = loading.load_checkpoint(directory, engine.state, step="latest" if step is None else step)
    for name, part in (("scheduler", scheduler), ("loader", loader)):
        if part is None:
            continue
        if name not in loaded.extra:
            raise ValueError(
                f"{directory}: step {loaded.step} holds no {name} state; save it with "
                f"save_checkpoint(..., {name}=...) or load without it"
            )
        part.load_state_dict(loaded.extra[name])
    states = loaded.extra.get("random")
    if states is not None and len(states) == engine.world_size:
        torch.set_rng_state(states[engine.rank].clone())
    return loaded


def _random_states(engine: Engine) -> torch.Tensor:
    own = torch.get_rng_state()
    table = torch.zeros(engine.world_size, own.numel(), dtype=torch.int32)
    table[engine.rank] = own.int()
    return engine.collectives.sum_(table, "random states for the checkpoint").to(torch.uint8)
