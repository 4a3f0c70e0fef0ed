"""``import deepspeed`` gives this package, in a process that asked for it and in no other.

A process asks by the environment variable that ``zero_ext_deepspeed_finder`` reads when Python starts, or by
:func:`activate`. A DeepSpeed that is installed stays as it is and is what every other process imports.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType

from zero_ext.integrations.deepspeed.registry import names
from zero_ext.integrations.deepspeed.unsupported import module_for
from zero_ext_deepspeed_finder import NAME, VARIABLE, Finder


class _Loader(importlib.abc.Loader):
    """Gives a module of this package under its second name; it keeps the spec of its first."""

    def __init__(self) -> None:
        self._spec: importlib.machinery.ModuleSpec | None = None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module = module_for(spec.name)
        self._spec = getattr(module, "__spec__", None)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec or module.__spec__


def loader_of(fullname: str) -> importlib.abc.Loader | None:
    """Return the loader of a module of DeepSpeed; None for others."""
    return None if names().module(fullname) is None else _Loader()


def is_active() -> bool:
    """Return whether ``import deepspeed`` gives this package in this process."""
    return any(isinstance(finder, Finder) for finder in sys.meta_path)


def activate() -> None:
    """From now on ``import deepspeed`` gives this package; once per process.

    Raises ``RuntimeError`` if another DeepSpeed was imported already.
    """
    if is_active():
        return
    if NAME in sys.modules:
        known = getattr(sys.modules[NAME], "__file__", None)
        raise RuntimeError(
            f"activate: expected a process without deepspeed, got one that has imported it from {known}. "
            f"Start the script with 'zero-ext run --deepspeed-compat', or with {VARIABLE}=1."
        )
    sys.meta_path.insert(0, Finder())
