"""All cases of the zoo, by name."""

from __future__ import annotations

import fnmatch
import importlib
import importlib.util
import pkgutil
from collections.abc import Iterable

import tests.zoo.own
from tests.zoo.case import Case

TRANSFORMERS = "tests.zoo.transformers_cases"


def own_modules() -> list[str]:
    """Return the names of the modules that hold handwritten models."""
    return [f"tests.zoo.own.{module.name}" for module in pkgutil.iter_modules(tests.zoo.own.__path__)]


def modules(pattern: str = "*") -> list[str]:
    """Return the modules that may hold cases matching ``pattern``.

    The cases from transformers are left out where no name can match, because importing them takes seconds.
    """
    found = [] if pattern.startswith("transformers") else own_modules()
    if not pattern.startswith("own/") and importlib.util.find_spec(TRANSFORMERS) is not None:
        found.append(TRANSFORMERS)
    return found


def cases_of(names: Iterable[str]) -> list[Case]:
    """Return the cases of modules, in order.

    Raises:
        ValueError: Two cases have the same name.
    """
    cases = [case for name in names for case in importlib.import_module(name).CASES]
    seen: set[str] = set()
    for case in cases:
        if case.name in seen:
            raise ValueError(f"zoo: expected unique names, got '{case.name}' twice. Rename one of them.")
        seen.add(case.name)
    return cases


def select(pattern: str = "*") -> list[Case]:
    """Return the cases whose name matches ``pattern``, or contains it where it has no wildcard."""
    wanted = pattern if "*" in pattern else f"*{pattern}*"
    return [case for case in cases_of(modules(pattern)) if fnmatch.fnmatch(case.name, wanted)]


def find(name: str) -> Case:
    """Return the case of exactly this name.

    Raises:
        KeyError: There is no such case.
    """
    family = name.split("/")[1]
    source = f"tests.zoo.own.{family}" if name.startswith("own/") else TRANSFORMERS
    for case in cases_of([source]):
        if case.name == name:
            return case
    raise KeyError(name)
