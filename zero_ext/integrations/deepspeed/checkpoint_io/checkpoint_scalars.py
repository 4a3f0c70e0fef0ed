"""The scalars of a DeepSpeed checkpoint, in the form of zero_ext's own."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from zero_ext.checkpoint import CheckpointError
from zero_ext.integrations.deepspeed.checkpoint_io.checkpoint_fields import one_number
from zero_ext.integrations.deepspeed.checkpoint_io.checkpoint_rank import RankState
from zero_ext.integrations.deepspeed.checkpoint_io.checkpoint_source import DeepSpeedCheckpoint

_ADAM = ("Adam", "AdamW")
_ADAM_KINDS = {"exp_avg", "exp_avg_sq"}
# How torch runs a step, and where DeepSpeed counts them: not settings of the training.
_NO_SETTINGS = ("step", "bias_correction", "foreach", "fused", "capturable", "differentiable")


def scalar_state(checkpoint: DeepSpeedCheckpoint, optimizer: str | None) -> dict[str, Any]:
    """Return the ``scalar_state`` of a zero_ext checkpoint for the class ``optimizer``, by default the one
    that the checkpoint names. CheckpointError or ValueError if that is unknown or its state incomplete.
    """
    first = checkpoint.first
    known = optimizer or _optimizer_class(checkpoint)
    names: list[list[str]] = [[] for _ in first.groups]
    for name, _, group in checkpoint.trained():
        names[group].append(name)
    return {
        "steps": checkpoint.model.global_steps,
        "skipped_steps": checkpoint.model.skipped_steps,
        "loss_scaler": _scaler(first),
        "param_groups": [
            {"settings": _settings(first, number), "params": held} for number, held in enumerate(names)
        ],
        "optimizer_class": known,
        "optimizer": _per_parameter(checkpoint, known),
    }


def _optimizer_class(checkpoint: DeepSpeedCheckpoint) -> str:
    """Adam or AdamW: from torch's own groups, else from the optimizer that the configuration names."""
    marks = {group.get("decoupled_weight_decay") for group in checkpoint.first.groups}
    if marks in ({True}, {False}):
        return "AdamW" if marks == {True} else "Adam"
    kind = checkpoint.model.configured("optimizer", "type")
    if isinstance(kind, str) and kind.lower() in ("adam", "adamw"):
        coupled = checkpoint.model.configured("optimizer", "params", "adam_w_mode") is False
        return "Adam" if kind.lower() == "adam" and coupled else "AdamW"
    kinds = sorted({key for moments in checkpoint.first.moments for key in moments})
    raise CheckpointError(
        f"{checkpoint.first.path}: expected the class of its optimizer, got none (its state is {kinds}, the "
        f"configuration names {kind!r:.80}). Pass optimizer='AdamW', or the class that you will prepare with."
    )


def _settings(first: RankState, number: int) -> dict[str, Any]:
    group = first.groups[number]
    if group.get("bias_correction", True) is not True:
        raise CheckpointError(
            f"{first.path}: param group {number}: expected bias_correction, got "
            f"{group['bias_correction']!r}. Use "
            "DeepSpeed: Adam without bias correction is not supported."
        )
    found = {}
    for key, value in group.items():
        if key in _NO_SETTINGS:
            continue
        value = list(value) if isinstance(value, tuple) else value
        number_of = one_number(value)
        plain = value is None or isinstance(value, bool | str) or number_of is not None
        if not plain and not (
            isinstance(value, list) and all(one_number(each) is not None for each in value)
        ):
            raise CheckpointError(
                f"{first.path}: param group {number}: expected a setting for {key}, got {value!r:.80}. Use "
                "another "
                "checkpoint."
            )
        found[key] = value if number_of is None else number_of
    return found


def _per_parameter(checkpoint: DeepSpeedCheckpoint, optimizer: str) -> dict[str, Any]:
    """Return what each parameter's optimizer state holds besides its tensors, as zero_ext's steppers
    keep it.
    """
    first = checkpoint.first
    fused = optimizer in _ADAM and not any(group.get("amsgrad") for group in first.groups)
    steps: dict[str, int] = {}
    others: dict[str, Any] = defaultdict(dict)
    first_flats = {group: flat for flat, group in reversed(list(enumerate(first.flat_groups)))}
    for name, entry, group in checkpoint.trained():
        flat = entry.fragments[0].flat if entry.fragments else first_flats[group]
        scalars = first.scalars[flat]
        if not fused:
            zero_dim = ["step"] if "step" in scalars else []
            others[name] = {"scalars": dict(scalars), "zero_dim": zero_dim}
            continue
        if set(first.moments[flat]) != _ADAM_KINDS:
            raise CheckpointError(
                f"{first.path}: {name!r}: expected the state {sorted(_ADAM_KINDS)} of {optimizer}, got "
                f"{sorted(first.moments[flat])}. Pass the optimizer that it was saved with."
            )
        count = one_number(scalars.get("step", first.groups[group].get("step")))
        if count is None or count != int(count) or count < 0:
            raise CheckpointError(
                f"{first.path}: {name!r}: expected a step from 0, got {count!r}. Use another checkpoint."
            )
        steps[name] = int(count)
    return {"step": steps} if fused else dict(others)


def _scaler(first: RankState) -> dict[str, Any]:
    """Return the loss scaler. DeepSpeed notes when the last overflow was, zero_ext how many steps ago."""
    saved = {} if first.file.loss_scaler is None else vars(first.file.loss_scaler)
    numbers = {
        "scale": one_number(saved.get("cur_scale", 1.0)),
        "hysteresis": one_number(saved.get("cur_hysteresis", 1)),
        "iteration": one_number(saved.get("cur_iter", 0)),
        "overflow": one_number(saved.get("last_overflow_iter", -1)),
    }
    for key, value in numbers.items():
        if value is None or value != value or abs(value) == float("inf"):
            raise CheckpointError(
                f"{first.path}: loss_scaler: expected a number for {key}, got {value!r}. Use another "
                "checkpoint."
            )
    clean = int(numbers["iteration"] or 0) - int(numbers["overflow"] or 0) - 1
    scale, hysteresis = float(numbers["scale"] or 0), int(numbers["hysteresis"] or 0)
    if scale <= 0 or hysteresis < 1 or clean < 0:
        raise CheckpointError(
            f"{first.path}: loss_scaler: expected a scale above 0, hysteresis from 1 and steps since the "
            "last "
            f"overflow from 0, got {scale}, {hysteresis} and {clean}. Use another checkpoint."
        )
    return {"scale": scale, "hysteresis": hysteresis, "clean_steps": clean}
