"""What the ranks run: one case in plain torch, or under one variant of zero_ext."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import linecache
import random
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy
import torch
from torch import nn

import zero_ext
from tests.multi.rank import World
from tests.zoo.case import Case, TrainingState
from tests.zoo.catalog import find

STEPS = 4
STEPS_BEFORE_CHECKPOINT = 2
SEED = 20_261_124
TIMEOUT_SECONDS = 40.0
TAIL_LINES = 14
REFUSALS = (RuntimeError, ValueError, TypeError)
PACKAGE = str(Path(zero_ext.__file__).parent)


class CaseError(Exception):
    """An error of a case, as JSON: kind ("refused" or "failed"), message and the end of the traceback."""


def seed_all(number: int) -> None:
    """Seed every generator that models draw from, alike on all ranks and in plain torch."""
    torch.manual_seed(SEED + number)
    random.seed(SEED + number)
    numpy.random.seed(SEED + number)


def train_plain(world: World, name: str, folder: str) -> dict[str, Any]:
    """Train the case in plain torch and return what it computed."""
    return _reported(lambda: _plain(find(name)), Path(folder) / "crash-0")


def train_variant(world: World, name: str, variant: str, folder: str) -> dict[str, Any]:
    """Train the case under a variant of zero_ext and return what this rank computed.

    "checkpoint" trains the first half of the steps on two ranks and saves, and the second half, when called
    again on one rank with the same folder, from the checkpoint.
    """
    return _reported(
        lambda: _sharded(world, find(name), variant, Path(folder)), Path(folder) / f"crash-{world.rank}"
    )


def _reported(run: Callable[[], dict[str, Any]], crash_file: Path) -> dict[str, Any]:
    # Models that nobody tuned warn of deprecated functions and of more staging than planned, in every run.
    with crash_file.open("w") as file, warnings.catch_warnings(action="ignore"):
        faulthandler.enable(file)
        try:
            return run()
        except Exception as error:
            raise CaseError(json.dumps(_described(error))) from None
        finally:
            faulthandler.disable()


def _described(error: Exception) -> dict[str, str]:
    lines = "".join(traceback.format_exception(error)).splitlines()
    return {
        "kind": "refused" if is_refusal(error) else "failed",
        "message": f"{type(error).__name__}: {error}",
        "tail": "\n".join(lines[-TAIL_LINES:]),
    }


def is_refusal(error: BaseException) -> bool:
    """Return whether zero_ext raised ``error`` by a statement of its own, as a mistake of the caller.

    An error that torch raises inside zero_ext is none: its last line of Python is a call.
    """
    if not isinstance(error, REFUSALS) or isinstance(error, NotImplementedError | RecursionError):
        return False
    trace: TracebackType | None = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    file = trace.tb_frame.f_code.co_filename
    if not file.startswith(PACKAGE):
        return False
    line = linecache.getline(file, trace.tb_lineno).strip()
    return line.startswith("raise ") or str(error).startswith("zero_ext")


def _plain(case: Case) -> dict[str, Any]:
    seed_all(0)
    models = _as_list(case.build())
    before = [_copied(model.state_dict()) for model in models]
    state = TrainingState(models, [case.optimizer(model) for model in models], sharded=False)
    if case.setup is not None:
        case.setup(state)
    record = _new_record()
    _train(case, state, record, range(STEPS))
    record["states"] = [_copied(model.state_dict()) for model in models]
    if all(
        torch.equal(value, old[name])
        for old, new in zip(before, record["states"], strict=True)
        for name, value in new.items()
        if value.is_floating_point() or value.is_complex()
    ):
        raise AssertionError("training changed no parameter, so the case proves nothing")
    return record


def _sharded(world: World, case: Case, variant: str, folder: Path) -> dict[str, Any]:
    config = _configuration(variant, folder)
    seed_all(0)
    sharded_init = variant == "init"
    initialization = (
        zero_ext.Init(config, process_group=world.group) if sharded_init else contextlib.nullcontext()
    )
    with initialization:
        built = _as_list(case.build())
    state = TrainingState([], [], sharded=True)
    for model in built:
        prepared, optimizer = zero_ext.prepare(
            model, case.optimizer(model), config, process_group=world.group
        )
        state.models.append(prepared)
        state.optimizers.append(optimizer)
    if case.setup is not None:
        case.setup(state)
    record = _new_record()
    steps = range(STEPS)
    checkpoints = [str(folder / f"model-{number}") for number in range(len(built))]
    if variant == "checkpoint":
        resumed = world.size == 1
        steps = steps[STEPS_BEFORE_CHECKPOINT:] if resumed else steps[:STEPS_BEFORE_CHECKPOINT]
        for path, model in zip(checkpoints if resumed else (), state.models, strict=False):
            zero_ext.load_checkpoint(path, model)
    _train(case, state, record, steps)
    if variant == "checkpoint" and world.size > 1:
        for path, model in zip(checkpoints, state.models, strict=True):
            zero_ext.save_checkpoint(path, model)
    else:
        record["states"] = [zero_ext.full_state_dict(model) for model in state.models]
    return record


def _configuration(variant: str, folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = {
        "stage": int(variant) if variant.isdigit() else 3,
        "timeout_seconds": TIMEOUT_SECONDS,
    }
    if variant == "nvme":
        storage = folder / "nvme"
        storage.mkdir(exist_ok=True)
        config["offload"] = {
            "params": "nvme",
            "grads": "nvme",
            "optimizer": "nvme",
            "nvme_paths": [str(storage)],
            "staging_buffer_bytes": 1 << 20,
        }
    return config


def _train(case: Case, state: TrainingState, record: dict[str, Any], steps: range) -> None:
    for step in steps:
        state.step_number = step
        inputs = case.batch(step)
        seed_all(1 + step)
        record["losses"].append(float(case.train_step(state, inputs).detach()))
        _evaluate(case, state, record, inputs, step)
    record["recorded"] = state.recorded


def _evaluate(case: Case, state: TrainingState, record: dict[str, Any], inputs: Any, step: int) -> None:
    if case.evaluate is None and case.generate is None:
        return
    for model in state.models:
        model.eval()
    with torch.no_grad():
        seed_all(1_000 + step)
        loss = case.evaluation(state, inputs)
        if loss is not None:
            record["evaluations"].append(float(loss))
        if case.generate is not None and step in (1, STEPS - 1):
            record["generated"].append(case.generate(state.model, inputs).detach().clone())
    for model in state.models:
        model.train()


def _new_record() -> dict[str, Any]:
    return {"losses": [], "evaluations": [], "generated": [], "recorded": {}, "states": []}


def _as_list(built: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    return [built] if isinstance(built, nn.Module) else list(built)


def _copied(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in state.items() if isinstance(value, torch.Tensor)}
