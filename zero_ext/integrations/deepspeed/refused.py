"""Stand-ins for DeepSpeed's names that are not served: they can be imported and asked for, not used."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn

from zero_ext.integrations.deepspeed.registry import Entry, find


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
def refused(path: str) -> type:
    """The stand-in of the refused name ``path``, like "deepspeed.PipelineModule"."""
    entry = find(path)
    if entry is None or entry.fate != "refused":
        raise AssertionError(f"{path} is no refused name")
    name = path.rpartition(".")[2]
    return _Refused(name, (_Base,), {"entry": entry, "__doc__": refusal(entry), "__module__": __name__})


def refused_names(module: str) -> Callable[[str], type]:
    """A module's ``__getattr__`` that knows the refused names of ``module``, like "deepspeed.ops.adam"."""

    def look_up(name: str) -> type:
        path = f"{module}.{name}"
        entry = find(path)
        if entry is None or entry.fate != "refused":
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return refused(path)

    return look_up
