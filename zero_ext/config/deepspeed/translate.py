"""DeepSpeed's JSON to a native configuration, with a note for every key that has no effect here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_ext.config.config_errors import ConfigError, Problem, show
from zero_ext.config.json_file import read_json_object
from zero_ext.config.zero_config import ONE_BIT, ZeroConfig

from .communication_rules import set_communication
from .key import Key
from .key_registry import KEYS, TABLE
from .monitor_rules import set_monitors
from .offload_rules import normalize_tiers, set_tiers
from .resolve_auto import ResolvedKeys, resolve_keys
from .sparse_attention_rules import set_sparse_attention
from .translation_note import Note

_ONE_BIT_KINDS = tuple(name.lower() for name in ONE_BIT)
_SOURCE = "DeepSpeed configuration"
_CLIPPING = 1.0
_DEFAULTS: dict[str, dict[str, Any]] = {
    "adam": {"lr": 1e-3, "weight_decay": 0.0},
    "adamw": {"lr": 1e-3, "weight_decay": 0.0},
    "lion": {"lr": 1e-3, "betas": [0.9, 0.999]},
}
_NO_EFFECT_PARAMS = ("torch_adam", "set_grad_none", "fused", "foreach")
# 1-bit and 0/1 Adam in DeepSpeed correct no bias, whatever this says.
_ONE_BIT_NO_EFFECT = ("bias_correction",)
_ONE_BIT_FALSE = ("amsgrad", "eps_inside_sqrt")
_TRUE_PARAMS = {
    "bias_correction": "Remove it: the moments are always corrected.",
    "fp32_optimizer_states": "Write bf16.bf16_optimizer_states true for moments in bf16.",
}


@dataclass(frozen=True)
class Translation:
    """A native configuration, with notes for the user about its translation from DeepSpeed's.

    Attributes:
        config: the native configuration.
        notes: one for each key that has no effect here or that has a default of DeepSpeed.
    """

    config: ZeroConfig
    notes: tuple[Note, ...] = ()


def load_deepspeed_config(
    source: Mapping[str, object] | str | Path, resolve: Mapping[str, object] | None = None
) -> Translation:
    """Translate DeepSpeed's JSON (0.19), given as a mapping or as the path of a file.

    Args:
        source: the configuration.
        resolve: values for keys that are "auto", by key path ("optimizer.params.lr"). Entries for keys that
            are not "auto" are ignored, so a caller may pass all its values.

    Returns:
        The native configuration and its notes.

    Raises:
        ConfigError: lists by key path every unknown key, wrong value, contradiction, unresolved "auto", and
            feature that does not exist here.
        TypeError: `source` is neither a mapping nor a path.

    Examples:
        >>> from zero_ext.config import load_deepspeed_config
        >>> source = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
        >>> config = load_deepspeed_config(source).config
        >>> config.stage, config.precision.dtype
        (2, 'bf16')
    """
    name = _SOURCE
    if isinstance(source, str | Path):
        name, values = str(source), read_json_object(source)
    elif isinstance(source, Mapping):
        values = dict(source)
    else:
        raise TypeError(f"configuration: expected a mapping or a path, got {show(source)}. Pass one of them.")
    resolved = resolve_keys(values, resolve or {})
    tier_notes = normalize_tiers(resolved)
    notes, native = _apply_keys(resolved)
    notes += resolved.notes + tier_notes
    _set_precision(resolved, native)
    _set_optimizer(resolved, native, notes)
    _set_leaf_modules(resolved, native)
    set_tiers(resolved, native)
    set_communication(resolved, native)
    set_monitors(resolved, native)
    set_sparse_attention(resolved, native, notes)
    if resolved.problems:
        raise ConfigError(resolved.problems, name)
    if "gradient_clipping" not in resolved.values:
        native["gradient_clipping"] = _CLIPPING
        notes.append(
            Note("gradient_clipping", "default", "not set, so 1.0 as in DeepSpeed 0.19. Write 0 for none")
        )
    try:
        return Translation(ZeroConfig.from_mapping(_nested(native)), tuple(notes))
    except ConfigError as error:
        raise ConfigError(
            [_in_deepspeed_words(problem, resolved) for problem in error.problems], name
        ) from None


def _apply_keys(resolved: ResolvedKeys) -> tuple[list[Note], dict[str, object]]:
    """Return notes on keys without effect and native values of keys that map one to one.

    Adds problems for unsupported keys.
    """
    notes: list[Note] = []
    native: dict[str, object] = {"stage": 0}
    stage = resolved.values.get("zero_optimization.stage", 0)
    for path, value in resolved.values.items():
        key = KEYS[path]
        written = resolved.written[path]
        if key.switch and not _is_on(key.switch, resolved):
            continue
        if stage not in key.stages and key.asks_for_something(value):
            acts = ", ".join(str(number) for number in key.stages)
            notes.append(Note(written, "no effect", f"it acts in stage {acts}, and the stage is {stage}"))
        elif key.fate == "supported":
            if key.native and value not in (None, math.inf):
                native[key.native] = key.native_value(value)
        elif key.asks_for_something(value) and not (_says_off(key, value) or _section_has_its_fate(key)):
            if key.fate == "no effect":
                notes.append(Note(written, "no effect", key.why))
            else:
                text = f"got {show(value)}, which is unsupported. {key.why}."
                resolved.problems.append(Problem(written, text))
    return notes, native


def _section_has_its_fate(key: Key) -> bool:
    """Return whether the key that turns the section on is noted or refused as a whole."""
    return bool(key.switch) and KEYS[key.switch].fate == key.fate


def _is_on(switch: str, resolved: ResolvedKeys) -> bool:
    """Return whether a section's switch is on: a flag that is true, or the name of something."""
    value = resolved.values.get(switch)
    return value is True or (isinstance(value, str) and KEYS[switch].asks_for_something(value))


def _says_off(key: Key, value: object) -> bool:
    """Return whether a full section is disabled by its own keys."""
    if not isinstance(value, dict):
        return False
    if key.path == "tensor_parallel":
        size = value.get("autotp_size")
        return not isinstance(size, bool) and size in (0, 1)
    said = [value[name] for name in ("deepcompile", "enabled") if name in value]
    return bool(said) and all(item is False for item in said)


def _set_precision(resolved: ResolvedKeys, native: dict[str, object]) -> None:
    half, brain = (resolved.values.get(f"{name}.enabled", False) for name in ("fp16", "bf16"))
    if half and brain:
        path = resolved.written["bf16.enabled"]
        resolved.problems.append(
            Problem(path, "expected false with fp16.enabled true, got true. Set one of them to false.")
        )
    dtype = "fp16" if half else "bf16" if brain else None
    if dtype is not None:
        native["precision.dtype"] = dtype
    wanted = resolved.values.get("data_types.param_dtype")
    if isinstance(wanted, str) and wanted.lower() != (dtype or "fp32"):
        seen = f"{dtype}.enabled is true" if dtype else "neither fp16.enabled nor bf16.enabled is true"
        resolved.problems.append(
            Problem(
                "data_types.param_dtype", f"got {show(wanted)}, but {seen}. Make them agree or remove it."
            )
        )
    if brain and resolved.values.get("bf16.bf16_optimizer_states") is True:
        native["precision.moments_dtype"] = "bf16"


def _set_optimizer(resolved: ResolvedKeys, native: dict[str, object], notes: list[Note]) -> None:
    for section in ("optimizer", "scheduler"):
        kind, params = resolved.values.get(f"{section}.type"), resolved.values.get(f"{section}.params")
        if kind is None:
            if params:
                resolved.problems.append(
                    Problem(f"{section}.type", "the required key is missing alongside params. Add it.")
                )
            continue
        settings = dict(params) if isinstance(params, dict) else {}
        if section == "optimizer":
            _set_fused(str(kind), settings, resolved, notes)
        native[section] = {"type": kind, "params": settings}


def _set_fused(kind: str, settings: dict[str, Any], resolved: ResolvedKeys, notes: list[Note]) -> None:
    """Remove unsupported params of an optimizer, and fill in DeepSpeed's defaults for Adam and Lion."""
    if "max_grad_norm" in settings:
        resolved.problems.append(
            Problem(
                "optimizer.params.max_grad_norm", "it is unsupported, as in DeepSpeed. Use gradient_clipping."
            )
        )
    if kind.lower() in _ONE_BIT_KINDS:
        _set_one_bit(kind, settings, resolved, notes)
    if kind.lower() not in _DEFAULTS:
        return
    if settings.get("torch_adam") is not True:
        for name, value in _DEFAULTS[kind.lower()].items():
            settings.setdefault(name, value)
    for name in _NO_EFFECT_PARAMS:
        if name in settings:
            settings.pop(name)
            notes.append(
                Note(f"optimizer.params.{name}", "no effect", f"there is one implementation of {kind}")
            )
    for name, why in _TRUE_PARAMS.items():
        value = settings.pop(name, True)
        if value is not True:
            resolved.problems.append(
                Problem(f"optimizer.params.{name}", f"expected true, got {show(value)}. {why}")
            )


def _set_one_bit(kind: str, settings: dict[str, Any], resolved: ResolvedKeys, notes: list[Note]) -> None:
    """Remove unsupported params of a one-bit optimizer."""
    for name in _ONE_BIT_NO_EFFECT:
        if name in settings:
            settings.pop(name)
            notes.append(Note(f"optimizer.params.{name}", "no effect", f"{kind} corrects no bias"))
    for name in _ONE_BIT_FALSE:
        value = settings.pop(name, False)
        if value is not False:
            resolved.problems.append(
                Problem(
                    f"optimizer.params.{name}",
                    f"expected false, since {kind} has no such form, got {show(value)}. Remove it.",
                )
            )
    for name in ("cuda_aware", "comm_backend_name"):
        if name in settings:
            why = "the ranks' own connections are used"
            notes.append(Note(f"optimizer.params.{name}", "no effect", why))


def _set_leaf_modules(resolved: ResolvedKeys, native: dict[str, object]) -> None:
    if resolved.values.get("zero_optimization.stage", 0) != 3:
        return
    names: list[str] = []
    for name in ("classes", "names"):
        names_or_name = resolved.values.get(f"zero_optimization.leaf_module.{name}", [])
        listed = (
            [names_or_name]
            if isinstance(names_or_name, str)
            else list(names_or_name)
            if isinstance(names_or_name, list)
            else []
        )
        names += [text.rpartition(".")[2] if name == "classes" else text for text in listed]
    if names:
        native["units.leaf_modules"] = list(dict.fromkeys(names))


def _nested(flat: Mapping[str, object]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, name = path.split(".")
        target = found
        for parent in parents:
            target = target.setdefault(parent, {})
        target[name] = value
    return found


def _in_deepspeed_words(problem: Problem, resolved: ResolvedKeys) -> Problem:
    """Return the same problem at the path of the key the user wrote."""
    for key in TABLE:
        if key.native and problem.path == key.native:
            return Problem(resolved.written.get(key.path, key.path), problem.text)
    return problem
