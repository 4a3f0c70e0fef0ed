"""Public names of a package that are imported when they are first asked for (PEP 562).

So that what needs no torch starts in a moment: the configuration, plans, the command line.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def lazy_getattr(package: str, module_of: Mapping[str, str]) -> Callable[[str], object]:
    """Return the ``__getattr__`` of ``package``, which imports a name from its module in ``module_of``.

    An empty module name means that the name is a submodule itself.
    """

    def attribute(name: str) -> object:
        module = module_of.get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(module), name) if module else import_module(f"{package}.{name}")
        setattr(sys.modules[package], name, value)
        return value

    return attribute
