"""DeepSpeed's JSON to a native configuration, with a note for every key that has no effect here."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_ext.config.base_section import key_paths, one_of
from zero_ext.config.config_errors import (
    SUGGESTIONS,
    ConfigError,
    Problem,
    join_path,
    show,
    unknown_key,
    wrong_value,
)
from zero_ext.config.optimizer_traits import traits_of
from zero_ext.config.sources.config_file import read_config_file
from zero_ext.config.zero_config import ZeroConfig

from .deepspeed_keys import AUTO, LEFT_OUT, Key, Note, ResolvedKeys
from .feature_keys import FEATURE_KEYS, set_communication, set_monitors, set_sparse_attention
from .muon_params import translate_muon
from .offload_keys import TIER_KEYS, normalize_tiers, set_tiers
from .training_keys import TRAINING_KEYS

TABLE: tuple[Key, ...] = TRAINING_KEYS + TIER_KEYS + FEATURE_KEYS
KEYS: dict[str, Key] = {}
SECTIONS: set[str] = set()  # paths of all groups: every proper prefix of a key's path


def register_key(key: Key) -> None:
    """Add a key, so that DeepSpeed's JSON may have it."""
    for path in (key.path, *key.aliases):
        KEYS[path] = key
        SECTIONS.update(path[:end] for end, letter in enumerate(path) if letter == ".")


for _key in TABLE:
    register_key(_key)

OPEN_SECTIONS = ("optimizer.params", "scheduler.params")
_CLIPPING = 1.0
_DTYPE, _DTYPES = "precision.dtype", ("keep", "fp32", "bf16", "fp16")
_DTYPE_SWITCHES = ("fp16.enabled", "bf16.enabled")
_NO_EFFECT_PARAMS = ("torch_adam", "set_grad_none", "fused", "foreach")
_CONNECTION_PARAMS = ("cuda_aware", "comm_backend_name")
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
    name = "DeepSpeed configuration"
    if isinstance(source, str | Path):
        name, values = str(source), read_config_file(source)
    elif isinstance(source, Mapping):
        values = dict(source)
    else:
        raise TypeError(f"configuration: expected a mapping or a path, got {show(source)}. Pass one of them.")
    try:
        return Translation(*translate(values, resolve or {}))
    except ConfigError as error:
        raise error.within(name) from None


def translate(
    values: Mapping[str, object], resolve: Mapping[str, object]
) -> tuple[ZeroConfig, tuple[Note, ...]]:
    """Return the native configuration and the notes of what a JSON holds.

    As :func:`load_deepspeed_config`, with native key paths in ``resolve`` too. ``LEFT_OUT`` there leaves out
    the key if it is "auto", and the default of DeepSpeed's if it is not written.
    """
    name = "DeepSpeed configuration"
    resolved = resolve_keys(values, resolve)
    normalize_tiers(resolved)
    native = _apply_keys(resolved)
    for set_values in (
        _set_precision,
        _set_optimizer,
        _set_leaf_modules,
        set_tiers,
        set_communication,
        set_monitors,
        set_sparse_attention,
    ):
        set_values(resolved, native)
    if resolved.problems:
        raise ConfigError(resolved.problems, name)
    if "gradient_clipping" not in resolved.values and resolve.get("gradient_clipping") is not LEFT_OUT:
        native["gradient_clipping"] = _CLIPPING
        resolved.note(
            "gradient_clipping", "not set, so 1.0 as in DeepSpeed 0.19. Write 0 for none", "default"
        )
    try:
        return ZeroConfig.from_mapping(_nested(native)), tuple(resolved.notes)
    except ConfigError as error:
        raise ConfigError(
            [_in_deepspeed_words(problem, resolved) for problem in error.problems], name
        ) from None


def resolve_keys(source: Mapping[str, object], resolve: Mapping[str, object]) -> ResolvedKeys:
    """Check every key and value of `source`; replace "auto" by `resolve`, which maps key paths to values."""
    resolved, native = ResolvedKeys(resolve=resolve), key_paths(ZeroConfig)
    for path in resolve:
        if path not in KEYS and path.rpartition(".")[0] not in OPEN_SECTIONS and path not in native:
            resolved.add_problem(path, f"{_unknown(path, resolved).text} Correct the argument resolve.")
    _walk("", source, resolve, resolved)
    return resolved


def _walk(
    prefix: str, section: Mapping[str, object], resolve: Mapping[str, object], resolved: ResolvedKeys
) -> None:
    for name, value in section.items():
        path = join_path(prefix, name)
        if path == "$schema":
            continue
        if isinstance(name, str) and "." in name and not prefix:
            # TRL writes such keys when it means the nested ones. DeepSpeed ignores them.
            resolved.note(path, "a key with dots is ignored, as in DeepSpeed. Nest it to set it")
        elif not isinstance(name, str) or "." in name:
            resolved.add_problem(
                path, f"expected a string without dots, got {show(name)}. Nest one mapping per name."
            )
        elif path in KEYS:
            _resolve_value(KEYS[path], path, value, resolve, resolved)
        elif path in SECTIONS:
            if isinstance(value, Mapping):
                _walk(path, value, resolve, resolved)
            elif value is not None:
                fix = 'Write {"stage": 1} for true.' if path == "zero_optimization" else "Write one."
                resolved.add_problem(path, f"expected a mapping, got {show(value)}. {fix}")
        else:
            resolved.problems.append(_unknown(path, resolved))


def _unknown(path: str, resolved: ResolvedKeys) -> Problem:
    return unknown_key(path, (*KEYS, *SECTIONS), suggests=len(resolved.problems) < SUGGESTIONS)


def _resolve_value(
    key: Key, path: str, value: object, resolve: Mapping[str, object], resolved: ResolvedKeys
) -> None:
    if isinstance(value, str) and value == AUTO and AUTO not in key.harmless:
        names = (path, key.path, *key.aliases, key.native)
        known = [resolve[name] for name in names if resolve.get(name, AUTO) != AUTO]
        if key.path in _DTYPE_SWITCHES and not known and _DTYPE in resolve:
            if resolve[_DTYPE] not in _DTYPES:
                resolved.add_problem(_DTYPE, wrong_value(one_of(_DTYPES), resolve[_DTYPE]))
            known = [f"{resolve[_DTYPE]}.enabled" == key.path]
        if not known and not key.auto:
            resolved.problems.append(_unresolved(path))
        if not known or known[0] is LEFT_OUT:
            resolved.written.setdefault(key.path, path)
            return
        value = known[0]
    elif path in OPEN_SECTIONS and isinstance(value, Mapping):
        value = _resolve_params(path, value, resolve, resolved)
    if not key.value_type.fits(value):
        resolved.add_problem(path, wrong_value(key.value_type.words, value))
    elif key.path in resolved.written:
        other = resolved.written[key.path]
        resolved.add_problem(path, f"it means the same as {other}. Keep one of the two.")
    else:
        resolved.values[key.path] = copy.deepcopy(value)
        resolved.written[key.path] = path


def _resolve_params(
    path: str, params: Mapping[str, object], resolve: Mapping[str, object], resolved: ResolvedKeys
) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in params.items():
        inner = join_path(path, name)
        if isinstance(value, str) and value == AUTO:
            if resolve.get(inner, AUTO) == AUTO:
                resolved.problems.append(_unresolved(inner))
                continue
            value = resolve[inner]
        if value is not LEFT_OUT:
            found[name] = value
    return found


def _unresolved(path: str) -> Problem:
    return Problem(
        path,
        "expected a value, got 'auto', which nothing resolves here. Write a value (load_deepspeed_config "
        f"also accepts resolve={{{path!r}: value}}).",
    )


def _apply_keys(resolved: ResolvedKeys) -> dict[str, object]:
    """Return native values of keys that map one to one, with notes on keys without effect and problems for
    unsupported ones.
    """
    native: dict[str, object] = {"stage": 0}
    for path, value in resolved.values.items():
        key, written = KEYS[path], resolved.written[path]
        if key.switch and not _is_on(key.switch, resolved):
            continue
        if resolved.stage not in key.stages and key.asks_for_something(value):
            acts = ", ".join(str(number) for number in key.stages)
            resolved.note(written, f"it acts in stage {acts}, and the stage is {resolved.stage}")
        elif key.fate == "supported":
            if key.native and value not in (None, math.inf):
                native[key.native] = key.native_value(value)
        elif not key.asks_for_something(value) or _says_off(key, value):
            continue
        # Otherwise the key that turns the section on is noted or refused for all of them.
        elif not key.switch or KEYS[key.switch].fate != key.fate:
            if key.fate == "no effect":
                resolved.note(written, key.why)
            else:
                resolved.add_problem(written, f"got {show(value)}, which is unsupported. {key.why}.")
    return native


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
        resolved.add_problem(
            resolved.written["bf16.enabled"],
            "expected false with fp16.enabled true, got true. Set one of them to false.",
        )
    dtype = "fp16" if half else "bf16" if brain else None
    if dtype is not None:
        native["precision.dtype"] = dtype
    wanted = resolved.values.get("data_types.param_dtype")
    if isinstance(wanted, str) and wanted.lower() != (dtype or "fp32"):
        seen = f"{dtype}.enabled is true" if dtype else "neither fp16.enabled nor bf16.enabled is true"
        resolved.add_problem(
            "data_types.param_dtype", f"got {show(wanted)}, but {seen}. Make them agree or remove it."
        )
    if brain and resolved.values.get("bf16.bf16_optimizer_states") is True:
        native["precision.moments_dtype"] = "bf16"


def _set_optimizer(resolved: ResolvedKeys, native: dict[str, object]) -> None:
    for section in ("optimizer", "scheduler"):
        kind, params = resolved.values.get(f"{section}.type"), resolved.values.get(f"{section}.params")
        if kind is None:
            if params:
                resolved.add_problem(
                    f"{section}.type", "the required key is missing alongside params. Add it."
                )
            continue
        settings = dict(params) if isinstance(params, dict) else {}
        if section == "optimizer":
            _set_fused(str(kind), settings, resolved)
            if str(kind).lower() == "muon":
                settings = translate_muon(settings, resolved)
        native[section] = {"type": kind, "params": settings}


def _set_fused(kind: str, settings: dict[str, Any], resolved: ResolvedKeys) -> None:
    """Remove unsupported params of an optimizer, and fill in DeepSpeed's defaults."""
    traits = traits_of(kind)
    if "max_grad_norm" in settings:
        _refuse_param("max_grad_norm", "it is unsupported, as in DeepSpeed. Use gradient_clipping.", resolved)
    if traits is not None and traits.one_bit_stages:
        # 1-bit and 0/1 Adam in DeepSpeed correct no bias, whatever this says.
        _ignore_params(("bias_correction",), f"{kind} corrects no bias", settings, resolved)
        for name in ("amsgrad", "eps_inside_sqrt"):
            value = settings.pop(name, False)
            if value is not False:
                text = f"expected false, since {kind} has no such form, got {show(value)}. Remove it."
                _refuse_param(name, text, resolved)
        _ignore_params(_CONNECTION_PARAMS, "the ranks' own connections are used", settings, resolved)
    if traits is None or not traits.deepspeed_defaults:
        return
    if settings.get("torch_adam") is not True:
        for name, value in traits.deepspeed_defaults.items():
            if resolved.resolve.get(f"optimizer.params.{name}") is not LEFT_OUT:
                settings.setdefault(name, value)
    _ignore_params(_NO_EFFECT_PARAMS, f"there is one implementation of {kind}", settings, resolved)
    for name, why in _TRUE_PARAMS.items():
        value = settings.pop(name, True)
        if value is not True:
            _refuse_param(name, f"expected true, got {show(value)}. {why}", resolved)


def _refuse_param(name: str, text: str, resolved: ResolvedKeys) -> None:
    resolved.add_problem(f"optimizer.params.{name}", text)


def _ignore_params(
    names: tuple[str, ...], why: str, settings: dict[str, Any], resolved: ResolvedKeys
) -> None:
    for name in names:
        if name in settings:
            del settings[name]
            resolved.note(f"optimizer.params.{name}", why)


def _set_leaf_modules(resolved: ResolvedKeys, native: dict[str, object]) -> None:
    if resolved.stage != 3:
        return
    names: list[str] = []
    for name in ("classes", "names"):
        listed = resolved.values.get(f"zero_optimization.leaf_module.{name}", [])
        for text in [listed] if isinstance(listed, str) else listed:
            names.append(text.rpartition(".")[2] if name == "classes" else text)
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
    for key in KEYS.values():
        if key.native and problem.path == key.native:
            return Problem(resolved.written.get(key.path, key.path), problem.text)
    return problem
