"""First half of the translation: from nested JSON to checked values by key path, every "auto" settled."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field

from zero_ext.config.schema.config_errors import SUGGESTIONS, Problem, join_path, show, unknown_key

from .key import Key
from .key_registry import KEYS, SECTIONS
from .translation_note import Note

AUTO = "auto"
_OPEN = ("optimizer.params", "scheduler.params")


@dataclass
class Settled:
    """Values by the key's own path (aliases resolved), the paths as written, what was wrong, and what was
    ignored."""

    values: dict[str, object] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)


def settle(source: Mapping[str, object], resolve: Mapping[str, object]) -> Settled:
    """Check every key and value of `source`; replace "auto" by `resolve`, which maps key paths to values."""
    settled = Settled()
    for path in resolve:
        if path not in KEYS and path.rpartition(".")[0] not in _OPEN:
            text = f"{_unknown(path, settled).text} (in the argument resolve)"
            settled.problems.append(Problem(path, text))
    _walk("", source, resolve, settled)
    return settled


def _walk(
    prefix: str, section: Mapping[str, object], resolve: Mapping[str, object], settled: Settled
) -> None:
    for name, value in section.items():
        path = join_path(prefix, name)
        if isinstance(name, str) and "." in name and not prefix:
            # TRL writes such keys when it means the nested ones. DeepSpeed ignores them.
            why = "a key with dots names nothing, in DeepSpeed either; nest it to set it"
            settled.notes.append(Note(path, "no effect", why))
        elif not isinstance(name, str) or "." in name:
            text = f"expected a string without dots, got {show(name)}. Nest one mapping per name."
            settled.problems.append(Problem(path, text))
        elif path in KEYS:
            _take(KEYS[path], path, value, resolve, settled)
        elif path in SECTIONS:
            if isinstance(value, Mapping):
                _walk(path, value, resolve, settled)
            elif value is not None:
                fix = '; write {"stage": 1} for true' if path == "zero_optimization" else ""
                settled.problems.append(Problem(path, f"got {show(value)}, wanted a mapping{fix}"))
        else:
            settled.problems.append(_unknown(path, settled))


def _unknown(path: str, settled: Settled) -> Problem:
    return unknown_key(path, (*KEYS, *SECTIONS), suggests=len(settled.problems) < SUGGESTIONS)


def _take(key: Key, path: str, value: object, resolve: Mapping[str, object], settled: Settled) -> None:
    if value == AUTO and AUTO not in key.harmless:
        known = [name for name in (path, key.path, *key.aliases) if resolve.get(name, AUTO) != AUTO]
        if not known:
            if not key.auto:
                settled.problems.append(_unresolved(path))
            return
        value = resolve[known[0]]
    elif path in _OPEN and isinstance(value, Mapping):
        value = _resolve_params(path, value, resolve, settled)
    if not key.kind.fits(value):
        settled.problems.append(Problem(path, f"got {show(value)}, wanted {key.kind.words}"))
        return
    other = settled.written.get(key.path)
    if other is not None:
        settled.problems.append(Problem(path, f"says the same as {other}; keep one of the two"))
        return
    settled.values[key.path] = copy.deepcopy(value)
    settled.written[key.path] = path


def _resolve_params(
    path: str, params: Mapping[str, object], resolve: Mapping[str, object], settled: Settled
) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in params.items():
        inner = join_path(path, name)
        if value == AUTO:
            if resolve.get(inner, AUTO) == AUTO:
                settled.problems.append(_unresolved(inner))
                continue
            value = resolve[inner]
        found[name] = value
    return found


def _unresolved(path: str) -> Problem:
    return Problem(
        path,
        "is 'auto' and nothing says what that is here; write a value (load_deepspeed_config also takes it as "
        f"resolve={{{path!r}: value}})",
    )
