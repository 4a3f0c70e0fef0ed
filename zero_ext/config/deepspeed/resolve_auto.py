"""First half of the translation: from nested JSON to checked values by key path, every "auto" resolved."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field

from zero_ext.config.config_errors import SUGGESTIONS, Problem, join_path, show, unknown_key, wrong_value

from .key import Key
from .key_registry import KEYS, SECTIONS
from .translation_note import Note

AUTO = "auto"
_OPEN = ("optimizer.params", "scheduler.params")


@dataclass
class ResolvedKeys:
    """Values by the key's own path (aliases resolved), the paths as written, what was wrong, and what was
    ignored."""

    values: dict[str, object] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)


def resolve_keys(source: Mapping[str, object], resolve: Mapping[str, object]) -> ResolvedKeys:
    """Check every key and value of `source`; replace "auto" by `resolve`, which maps key paths to values."""
    resolved = ResolvedKeys()
    for path in resolve:
        if path not in KEYS and path.rpartition(".")[0] not in _OPEN:
            text = f"{_unknown(path, resolved).text} Correct the argument resolve."
            resolved.problems.append(Problem(path, text))
    _walk("", source, resolve, resolved)
    return resolved


def _walk(
    prefix: str, section: Mapping[str, object], resolve: Mapping[str, object], resolved: ResolvedKeys
) -> None:
    for name, value in section.items():
        path = join_path(prefix, name)
        if isinstance(name, str) and "." in name and not prefix:
            # TRL writes such keys when it means the nested ones. DeepSpeed ignores them.
            why = "a key with dots is ignored, as in DeepSpeed. Nest it to set it"
            resolved.notes.append(Note(path, "no effect", why))
        elif not isinstance(name, str) or "." in name:
            text = f"expected a string without dots, got {show(name)}. Nest one mapping per name."
            resolved.problems.append(Problem(path, text))
        elif path in KEYS:
            _resolve_value(KEYS[path], path, value, resolve, resolved)
        elif path in SECTIONS:
            if isinstance(value, Mapping):
                _walk(path, value, resolve, resolved)
            elif value is not None:
                fix = 'Write {"stage": 1} for true.' if path == "zero_optimization" else "Write one."
                resolved.problems.append(Problem(path, f"expected a mapping, got {show(value)}. {fix}"))
        else:
            resolved.problems.append(_unknown(path, resolved))


def _unknown(path: str, resolved: ResolvedKeys) -> Problem:
    return unknown_key(path, (*KEYS, *SECTIONS), suggests=len(resolved.problems) < SUGGESTIONS)


def _resolve_value(
    key: Key, path: str, value: object, resolve: Mapping[str, object], resolved: ResolvedKeys
) -> None:
    if value == AUTO and AUTO not in key.harmless:
        known = [name for name in (path, key.path, *key.aliases) if resolve.get(name, AUTO) != AUTO]
        if not known:
            if not key.auto:
                resolved.problems.append(_unresolved(path))
            return
        value = resolve[known[0]]
    elif path in _OPEN and isinstance(value, Mapping):
        value = _resolve_params(path, value, resolve, resolved)
    if not key.value_type.fits(value):
        resolved.problems.append(Problem(path, wrong_value(key.value_type.words, value)))
        return
    other = resolved.written.get(key.path)
    if other is not None:
        resolved.problems.append(Problem(path, f"it means the same as {other}. Keep one of the two."))
        return
    resolved.values[key.path] = copy.deepcopy(value)
    resolved.written[key.path] = path


def _resolve_params(
    path: str, params: Mapping[str, object], resolve: Mapping[str, object], resolved: ResolvedKeys
) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in params.items():
        inner = join_path(path, name)
        if value == AUTO:
            if resolve.get(inner, AUTO) == AUTO:
                resolved.problems.append(_unresolved(inner))
                continue
            value = resolve[inner]
        found[name] = value
    return found


def _unresolved(path: str) -> Problem:
    return Problem(
        path,
        "expected a value, got 'auto', which nothing resolves here. Write a value (load_deepspeed_config "
        f"also accepts resolve={{{path!r}: value}}).",
    )
