"""Stand-ins for DeepSpeed's names that are not served: they can be imported and asked for, not used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NoReturn

from zero_ext.integrations.deepspeed.registry import MODULES, Entry, find, module_refusal


class DeepSpeedFeatureError(RuntimeError):
    """A feature of DeepSpeed that zero_ext does not offer; the message says what to do instead."""


class DeepSpeedModuleError(DeepSpeedFeatureError, ImportError):
    """A module of DeepSpeed all of whose features are missing here."""


def refusal(entry: Entry) -> str:
    """What the error for a refused name says."""
    return f"{entry.path}: this feature of DeepSpeed is not served by zero_ext: {entry.note}"


class _Refused(type):
    """Of classes that nobody can make or derive from; ``isinstance`` says no, as it should."""

    entry: Entry

    def __call__(cls, *_: Any, **__: Any) -> NoReturn:
        raise DeepSpeedFeatureError(refusal(cls.entry))

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):  # asked by the interpreter, inspect and pickling libraries, not by users
            raise AttributeError(name)
        raise DeepSpeedFeatureError(refusal(cls.entry))


class _Base:
    def __init_subclass__(cls, **_: Any) -> None:
        if "entry" not in vars(cls):
            raise DeepSpeedFeatureError(refusal(cls.entry))  # type: ignore[attr-defined]


@cache
def stand_in(entry: Entry) -> type:
    """The stand-in of a refused name or module."""
    name = entry.path.rpartition(".")[2]
    return _Refused(name, (_Base,), {"entry": entry, "__doc__": refusal(entry), "__module__": __name__})


def names_of(module: str, later: Mapping[str, str] | None = None) -> Callable[[str], Any]:
    """The ``__getattr__`` of the module here that has the names of DeepSpeed's ``module``: its submodules,
    which may lie elsewhere here, stand-ins for what is refused, and names that another of its modules has,
    ``later``, which is imported when they are asked for."""
    here = MODULES[module]
    paths = [path for path, local in MODULES.items() if local == here]

    def look_up(name: str) -> Any:
        if later is not None and name in later:
            return getattr(importlib.import_module(MODULES[later[name]]), name)
        for path in dict.fromkeys((module, *paths)):
            inner = f"{path}.{name}"
            if inner in MODULES:
                return importlib.import_module(MODULES[inner])
            entry = find(inner) or module_refusal(inner)
            if entry is not None and entry.fate == "refused":
                return stand_in(entry)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return look_up
