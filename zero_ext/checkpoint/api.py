"""Checkpoints of a prepared model with all that a resume needs: the calls users make."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from zero_ext.activation.random_streams import DefaultGenerator
from zero_ext.checkpoint import loading as loading
from zero_ext.checkpoint import saving as saving
from zero_ext.checkpoint.files import CheckpointError
from zero_ext.checkpoint.format.json_state import decode
from zero_ext.checkpoint.inspection import open_checkpoint
from zero_ext.checkpoint.loading import LoadedCheckpoint
from zero_ext.checkpoint.save_session import SaveHandle, save_in_progress, session_of
from zero_ext.comm import Collectives
from zero_ext.zero.api.engine_lookup import OBSTACLES, checkpoint_sources, engine_of
from zero_ext.zero.api.engine_state import EngineState, ModelParallelState
from zero_ext.zero.construction.rank_consistency import of_all_ranks
from zero_ext.zero.engine import Engine


class Stateful(Protocol):
    """A scheduler, loader or the like."""

    def state_dict(self) -> dict[str, Any]:
        """Its state."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Restore it."""


def save_checkpoint(
    directory: str | os.PathLike[str],
    model: nn.Module,
    *,
    step: int | None = None,
    scheduler: Stateful | None = None,
    loader: Stateful | None = None,
    client_state: Any = None,
    async_save: bool | None = None,
    keep_last: int | None = None,
    include_frozen: bool = True,
) -> SaveHandle:
    """Save a prepared model with its optimizer as `directory/step-000123`; a collective of all ranks.

    Each rank's random state goes along. A save of state on NVMe is written before this returns. The last
    checkpoint stays complete whatever happens, a killed process included.

    Args:
        directory: holds the checkpoints, one folder each.
        model: what [`prepare`][zero_ext.prepare] returned.
        step: number of the checkpoint; default the optimizer steps so far. One of the same number is
            replaced.
        scheduler: saved too; anything with `state_dict`.
        loader: saved too; anything with `state_dict`.
        client_state: the user's own state of None, numbers, text, bytes, lists, tuples, dicts and tensors up
            to 16 MiB; rank 0's is saved.
        async_save: copy the state in host memory, return, and write in the background; default the
            configuration's `checkpoint.async_save`.
        keep_last: number of checkpoints to keep, older ones are removed; default the configuration's
            `checkpoint.keep_last`.
        include_frozen: False leaves out what nothing trains, as the base model under adapters.

    Returns:
        The save. Its `wait()` returns the folder.

    Raises:
        ValueError: an argument is out of range, or differs between ranks.
        TypeError: a state is of a type that cannot be saved.
        CheckpointError: on every rank, if writing fails on any.

    Examples:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model, optimizer = zero_ext.prepare(model, optimizer, {"stage": 3})
        >>> zero_ext.save_checkpoint("checkpoints", model, client_state={"epoch": 3}).wait().name
        'step-000000'
    """
    engine = engine_of(model)
    engine.finish_updates()
    everyone, label = checkpoint_sources(engine).full.everyone, "random states for the checkpoint"
    extra: dict[str, Any] = {"random": random_states(everyone, torch.get_rng_state(), label)}
    if engine.device.type != "cpu":
        own = DefaultGenerator(engine.device).state()
        extra["device_random"] = {engine.device.type: random_states(everyone, own, label)}
    for name, stateful in (("scheduler", scheduler), ("loader", loader)):
        if stateful is not None:
            extra[name] = stateful.state_dict()
    policy = engine.config.checkpoint
    return saving.save_state(
        directory,
        checkpoint_sources(engine).of_all_ranks(include_frozen),
        step=step,
        client_state=client_state,
        keep_last=policy.keep_last if keep_last is None else keep_last,
        async_save=policy.async_save if async_save is None else async_save,
        extra=extra,
        tag_validation=policy.tag_validation,
    )


def load_checkpoint(
    directory: str | os.PathLike[str],
    model: nn.Module,
    *,
    step: int | None = None,
    scheduler: Stateful | None = None,
    loader: Stateful | None = None,
    include_frozen: bool = True,
    optimizer: bool = True,
) -> LoadedCheckpoint:
    """Load a checkpoint into a prepared model; a collective of all ranks.

    The checkpoint may come from any world size, stage and device. Random states are restored where the world
    size is the same, the device's where it is of the same type.

    Weights of other formats, or of a model with other parameters, are for
    [`load_weights`][zero_ext.load_weights].

    Args:
        directory: holds the checkpoints.
        model: what [`prepare`][zero_ext.prepare] returned.
        step: number of the checkpoint; default the latest.
        scheduler: restored too; anything with `load_state_dict`.
        loader: restored too; anything with `load_state_dict`.
        include_frozen: False for a checkpoint that was saved with it, into a model if its frozen parameters
            are those it was trained with.
        optimizer: False leaves the optimizer's state, its step count, the loss scale and the random states as
            they are, and takes weights, buffers and what is named above.

    Returns:
        Step and client state.

    Raises:
        ValueError: the state of a `scheduler` or `loader` was not saved or does not fit, or parameters do not
            fit; nothing was changed.
        CheckpointError: the checkpoint is missing, damaged or foreign; nothing was changed.
        RuntimeError: the optimizer's state is damaged, and would stay.

    Examples:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model, optimizer = zero_ext.prepare(model, optimizer, {"stage": 3})
        >>> path = zero_ext.save_checkpoint("checkpoints", model, client_state={"epoch": 3}).wait()
        >>> loaded = zero_ext.load_checkpoint("checkpoints", model)
        >>> loaded.step, loaded.client_state
        (0, {'epoch': 3})
    """
    engine = engine_of(model)
    engine.finish_updates(replaced=True)
    # Before the load's own exchanges, which know nothing of what the other ranks may be doing instead.
    engine.collectives.sum_(torch.zeros(1, device="cpu"), "load_checkpoint")
    statefuls = {
        name: stateful
        for name, stateful in (("scheduler", scheduler), ("loader", loader))
        if stateful is not None
    }
    if not optimizer:
        engine.optimizer_step.refuse_damage()
        engine.updates.refuse_drift("a load of weights alone")
    source = checkpoint_sources(engine).of_all_ranks(include_frozen)
    states = _saved_states(directory, source, step, statefuls) if statefuls else {}
    before = {name: copy.deepcopy(statefuls[name].state_dict()) for name in states}
    try:
        for name, state in states.items():
            statefuls[name].load_state_dict(state)
        loaded = loading.load_state(
            directory, source, step="latest" if step is None else step, optimizer=optimizer
        )
    except Exception:
        source.abandon_load()
        for name, state in before.items():
            statefuls[name].load_state_dict(state)
        raise
    if optimizer:
        _restore_random_states(engine, loaded.extra)
    return loaded


def random_states(everyone: Collectives, own: torch.Tensor, label: str) -> list[torch.Tensor]:
    """Return the random state ``own`` of every rank in rank order on rank 0, and an empty list elsewhere; a
    collective.

    Only rank 0 writes the manifest, so the others need not encode N states. A list, because a table of more
    than 3,300 ranks exceeds the limit of a tensor in the manifest.
    """
    table = of_all_ranks(everyone, own, label)
    return list(table) if everyone.rank == 0 else []


def _saved_states(
    directory: str | os.PathLike[str],
    source: EngineState | ModelParallelState,
    step: int | None,
    names: Iterable[str],
) -> dict[str, Any]:
    """Return the saved states of ``names``; none if the manifest is damaged, which the load raises."""
    session_of(source).finish_previous()
    try:
        _, manifest = open_checkpoint(directory, step)
        states = {
            name: decode(manifest.extra[name], f"extra.{name}") for name in names if name in manifest.extra
        }
    except (CheckpointError, ValueError, RecursionError):
        return {}
    for name in names:
        if name not in states:
            raise ValueError(
                f"{directory}: step {manifest.step} holds no {name} state. Save it with "
                f"save_checkpoint(..., {name}=...), or load without it."
            )
    return states


def _background_save(engine: Engine) -> str:
    sources = checkpoint_sources(engine)
    for source in (sources.full, sources.trained, sources.own):
        handle = save_in_progress(source)
        if handle is not None:
            return f"{handle.path}: it is being saved in the background. Call wait() of its handle first."
    return ""


OBSTACLES.append(_background_save)


def _restore_random_states(engine: Engine, extra: Mapping[str, Any]) -> None:
    ranks = checkpoint_sources(engine).full.everyone
    states = extra.get("random")
    if states is not None and len(states) == ranks.world_size:
        torch.set_rng_state(states[ranks.rank].clone())
    states = extra.get("device_random", {}).get(engine.device.type)
    if states is not None and len(states) == ranks.world_size:
        DefaultGenerator(engine.device).restore(states[ranks.rank].clone())
