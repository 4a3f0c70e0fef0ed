"""DeepSpeed's modules as they are here, stand-ins for names that are not served, and ``import deepspeed``.

Every name of DeepSpeed can be imported and asked for. One that is not served raises
:class:`DeepSpeedFeatureError` when it is used.

A process asks for ``import deepspeed`` by the environment variable that ``zero_ext_import_hooks`` reads
when Python starts, or by :func:`activate`. A DeepSpeed that is installed stays as it is and is what every
other process imports.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any, NoReturn

from torch import nn

from zero_ext.integrations.deepspeed.name_registry import (
    ROOT,
    Definition,
    fix_of,
    mirrors_of,
    names,
    reason_of,
)
from zero_ext_import_hooks import VARIABLE, Finder


class DeepSpeedFeatureError(RuntimeError):
    """A feature of DeepSpeed that zero_ext does not offer; the message says what to do instead."""


class DeepSpeedMemberError(DeepSpeedFeatureError, AttributeError):
    """A method or attribute of DeepSpeed's engine that zero_ext does not offer; ``hasattr`` is False."""


def missing_member(engine: nn.Module, name: str) -> AttributeError | None:
    """Return the error of an attribute that neither ``engine`` nor its model has. None where torch's own
    error is the right one: before the engine is set up, and from inside a property of the model."""
    own = vars(engine).get("_modules", {}).get("module")
    if own is None or hasattr(type(own), name):
        return None
    path = names().member(name)
    if path is not None:
        return DeepSpeedMemberError(f"engine.{name}: it is not supported. {fix_of(path)}")
    kind, model = type(engine).__name__, type(own).__name__
    return AttributeError(
        f"{name}: expected an attribute of {kind} or of its model, {model}, got neither. Check the name.",
        name=name,
        obj=engine,
    )


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
    return None if module is None else _made(module)


@cache
def _made(module: str) -> ModuleType:
    if module == ROOT:
        return importlib.import_module(*mirrors_of(ROOT))
    made = ModuleType(module, f"The names of DeepSpeed's module {module}, as far as they are served.")
    vars(made).update(__getattr__=names_of(module, vars(made)), __dir__=lambda: _public(module))
    return made


def names_of(module: str, namespace: dict[str, Any]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of the module here that stands for DeepSpeed's: submodules, names that
    DeepSpeed imports there from elsewhere, constants, and stand-ins for what is not served.

    What was found once is in ``namespace``, the module's own names, from then on.
    """

    def look_up(name: str) -> Any:
        if name == "__all__":
            return _public(module)
        definition = names().definition(module, name)
        if definition is not None:
            found = _value(f"{module}.{name}", definition)
        else:  # torch's, say, which modules of DeepSpeed import as well
            found = None if name.startswith("__") else _served_in(module, name)
            if found is None:
                raise AttributeError(f"module {module!r} has no attribute {name!r}")
        namespace[name] = found
        return found

    return look_up


def _public(module: str) -> list[str]:
    return sorted(each for each in names().all_of(module) if not each.startswith("_"))


def _value(path: str, definition: Definition) -> Any:
    if not definition.name:
        return module_for(definition.module)
    found = served(definition)
    if found is None and names().is_constant(definition):
        return names().constants(definition.module)[definition.name]
    return stand_in(path, definition.path) if found is None else found


def served(definition: Definition) -> Any:
    """Return what stands here for a name of DeepSpeed; None if nothing does."""
    return _served_in(definition.module, definition.name)


def _served_in(module: str, name: str) -> Any:
    for mirror in mirrors_of(module):
        found = vars(importlib.import_module(mirror)).get(name)
        if found is not None and not isinstance(found, ModuleType):
            return found
    return None


class _Loader(importlib.abc.Loader):
    """Gives a module of this package under its second name; the package keeps the spec of its first."""

    _spec: importlib.machinery.ModuleSpec | None = None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module = module_for(spec.name)
        self._spec = getattr(module, "__spec__", None)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec or module.__spec__


def loader_of(fullname: str) -> importlib.abc.Loader | None:
    """Return the loader of a module of DeepSpeed; None for others."""
    return None if names().module(fullname) is None else _Loader()


def activate() -> None:
    """From now on ``import deepspeed`` gives this package; once per process.

    Raises ``RuntimeError`` if another DeepSpeed was imported already.
    """
    if any(isinstance(finder, Finder) for finder in sys.meta_path):
        return
    if ROOT in sys.modules:
        known = getattr(sys.modules[ROOT], "__file__", None)
        raise RuntimeError(
            f"activate: expected a process without deepspeed, got one that has imported it from {known}. "
            f"Start the script with 'zero-ext run --deepspeed-compat', or with {VARIABLE}=1."
        )
    sys.meta_path.insert(0, Finder())
