"""DeepSpeed's modules as they are here, and stand-ins for names that are not served.

Every name of DeepSpeed can be imported and asked for. One that is not served raises
:class:`DeepSpeedFeatureError` when it is used.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any, NoReturn

from zero_ext.integrations.deepspeed.registry import Definition, mirror_of, names, nearest_mirror, reason_of


class DeepSpeedFeatureError(RuntimeError):
    """A feature of DeepSpeed that zero_ext does not offer; the message says what to do instead."""


class _Refused(type):
    """Of classes that nobody can make, use or derive from; ``isinstance`` says no, as it should."""

    refusal: str

    def _refuse(cls, *_: Any, **__: Any) -> NoReturn:
        raise DeepSpeedFeatureError(cls.refusal)

    # What a function, a decorator, a list, a dictionary or a flag is used by.
    __call__ = __getitem__ = __iter__ = __len__ = __contains__ = __bool__ = __enter__ = __exit__ = _refuse

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):  # asked by the interpreter, inspect and pickling libraries, not by users
            raise AttributeError(name)
        cls._refuse()


class _Base(Exception):  # an exception, so that an `except` clause may name a stand-in
    def __init_subclass__(cls, **_: Any) -> None:
        if "refusal" not in vars(cls):
            cls._refuse()  # type: ignore[attr-defined]


@cache
def stand_in(path: str, definition: str) -> type:
    """Return the stand-in of the name ``path``, which DeepSpeed defines as ``definition``."""
    text = f"{path}: this feature of DeepSpeed is not served by zero_ext: {reason_of(definition)}"
    own = {"refusal": text, "__doc__": text, "__module__": __name__}
    return _Refused(path.rpartition(".")[2], (_Base,), own)


def module_for(path: str) -> ModuleType | None:
    """DeepSpeed's module ``path`` as it is here; None if DeepSpeed has no module of that name."""
    module = names().module(path)
    if module is None:
        return None
    mirror = mirror_of(module)
    return _made(module) if mirror is None else importlib.import_module(mirror)


@cache
def _made(module: str) -> ModuleType:
    """Return a module for one that has no mirror."""
    made = ModuleType(module, f"The names of DeepSpeed's module {module}, as far as they are served.")
    vars(made)["__getattr__"] = names_of(module)
    return made


def names_of(*modules: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of the module here that stands for these of DeepSpeed: submodules, names
    that DeepSpeed imports there from elsewhere, constants, and stand-ins for what is not served.
    """

    def look_up(name: str) -> Any:
        if name == "__all__":
            found = {each for module in modules for each in names().all_of(module)}
            return sorted(each for each in found if not each.startswith("_"))
        for module in modules:
            definition = names().definition(module, name)
            if definition is not None:
                return _value(f"{module}.{name}", definition)
        raise AttributeError(f"module {modules[0]!r} has no attribute {name!r}")

    return look_up


def _value(path: str, definition: Definition) -> Any:
    if not definition.name:
        return module_for(definition.module)
    found = served(definition)
    if found is None and names().is_constant(definition):
        return names().constants(definition.module)[definition.name]
    return stand_in(path, definition.path) if found is None else found


def served(definition: Definition) -> Any:
    """Return what stands here for a name of DeepSpeed; None if nothing does."""
    mirror = mirror_of(definition.module) or nearest_mirror(definition.module)
    found = None if mirror is None else vars(importlib.import_module(mirror)).get(definition.name)
    return None if isinstance(found, ModuleType) else found
