"""The names of DeepSpeed's modules, as scripts/deepspeed_names.py read them from its sources."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

ROOT = "deepspeed"
FILE = Path(__file__).with_name("names.json")


class Definition(NamedTuple):
    """The place where DeepSpeed defines a name. ``name`` is empty if the name is a module."""

    module: str
    name: str

    @property
    def path(self) -> str:
        """The full dotted name."""
        return f"{self.module}.{self.name}" if self.name else self.module


class Names:
    """Questions about the content of names.json."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.version: str = values["versions"][ROOT]
        self.used: dict[str, list[str]] = values["used"]
        self.modules: dict[str, Any] = values["modules"]

    def constants(self, module: str) -> dict[str, Any]:
        """Return the constants that ``module`` defines, with their values."""
        found: dict[str, Any] = self.modules[module].get("constants", {})
        return found

    def is_constant(self, definition: Definition) -> bool:
        """Return whether a name is a constant, which this package has by its value."""
        return bool(definition.name) and definition.name in self.constants(definition.module)

    def own(self, module: str) -> set[str]:
        """Return the names that ``module`` defines."""
        return {*self.modules[module].get("own", "").split(), *self.constants(module)}

    def all_of(self, module: str) -> set[str]:
        """Return all names of ``module`` except for its submodules: those it defines and those it imports."""
        found = self.own(module)
        for origin, pairs in self._imports(module):
            found |= pairs.keys() - {"*"}
            if "*" in pairs:
                found |= {name for name in self.all_of(origin) if not name.startswith("_")}
        return found

    def definition(self, module: str, name: str, passed: tuple[str, ...] = ()) -> Definition | None:
        """Return where ``name`` of ``module`` is defined; None if there is no such name.

        ``passed`` are modules that import from each other and were asked on the way here.
        """
        if f"{module}.{name}" in self.modules:
            return Definition(f"{module}.{name}", "")
        if module not in self.modules or module in passed:
            return None
        if name in self.own(module):
            return Definition(module, name)
        for origin, pairs in self._imports(module):
            there = pairs.get(name, name if "*" in pairs and not name.startswith("_") else None)
            found = self.definition(origin, there, (*passed, module)) if there else None
            if found is not None:
                return found
        return None

    def module(self, path: str) -> str | None:
        """Return the module that ``import path`` means, or None: DeepSpeed also binds modules, like
        ``deepspeed.zero``, under shorter names."""
        if path in self.modules:
            return path
        parent, _, name = path.rpartition(".")
        behind = self.module(parent) if parent else None
        found = self.definition(behind, name) if behind else None
        return found.module if found is not None and not found.name else None

    @cached_property
    def short_modules(self) -> dict[str, str]:
        """Modules that the package itself binds under a shorter name, by their full name."""
        found = ((self.definition(ROOT, name), name) for name in self.all_of(ROOT))
        return {where.module: f"{ROOT}.{name}" for where, name in found if where and not where.name}

    def _imports(self, module: str) -> Iterator[tuple[str, dict[str, str]]]:
        for origin, names in self.modules[module].get("from", {}).items():
            pairs = (pair.partition(":") for pair in names.split())
            yield origin, {alias or name: name for name, _, alias in pairs}


@cache
def names() -> Names:
    """Return the names of the release that this package follows."""
    return Names(json.loads(FILE.read_text(encoding="utf-8")))
