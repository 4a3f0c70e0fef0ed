"""``import deepspeed`` gives this package, in a process that asked for it and in no other.

Nothing here runs by itself: ``zero-ext run --deepspeed-compat`` calls :func:`activate` before the script
starts. A DeepSpeed that is installed stays as it is and is what every other process imports.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType

from zero_ext.integrations.deepspeed.refused import DeepSpeedModuleError, refusal
from zero_ext.integrations.deepspeed.registry import API_VERSION, MODULES, module_refusal

NAME = "deepspeed"
_EVERYTHING = importlib.metadata.DistributionFinder.Context()


class LookAlikeFinder(importlib.metadata.DistributionFinder):
    """Finds ``deepspeed`` and its modules here, and a distribution of that name and of DeepSpeed's
    version."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A spec for every module that is served or refused; None for all others."""
        if fullname in MODULES:
            loader: importlib.abc.Loader = _Served(MODULES[fullname])
        elif fullname.startswith(f"{NAME}.") and module_refusal(fullname) is not None:
            loader = _Refused()
        else:
            return None
        return importlib.machinery.ModuleSpec(fullname, loader, origin="zero_ext", is_package=True)

    def find_distributions(
        self,
        context: importlib.metadata.DistributionFinder.Context = _EVERYTHING,
    ) -> Iterable[importlib.metadata.Distribution]:
        """The distribution, if it is asked for by name or with all others."""
        if context.name is None or context.name.lower() == NAME:
            yield _Distribution()


class _Served(importlib.abc.Loader):
    """Gives a module of this package under its second name; it keeps the spec of its first."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._spec: importlib.machinery.ModuleSpec | None = None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


class _Refused(importlib.abc.Loader):
    """Raises what the registry says of the module."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        entry = module_refusal(spec.name)
        if entry is None:
            raise AssertionError(f"{spec.name} is not refused")
        raise DeepSpeedModuleError(refusal(entry._replace(path=spec.name)))

    def exec_module(self, module: ModuleType) -> None:
        raise AssertionError("a refused module was made")


class _Distribution(importlib.metadata.Distribution):
    """What package metadata tells about DeepSpeed: name and version."""

    def read_text(self, filename: str) -> str | None:
        if filename == "METADATA":
            summary = "zero_ext under DeepSpeed's names"
            return f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {API_VERSION}\nSummary: {summary}\n"
        return None

    def locate_file(self, path: object) -> None:  # type: ignore[override]  # there are no files
        return None


def is_active() -> bool:
    """Whether ``import deepspeed`` gives this package in this process."""
    return any(isinstance(finder, LookAlikeFinder) for finder in sys.meta_path)


def activate() -> None:
    """From now on ``import deepspeed`` gives this package; once a process.

    Raises ``RuntimeError`` if another DeepSpeed was imported already.
    """
    if is_active():
        return
    known = sys.modules.get(NAME)
    if known is not None:
        raise RuntimeError(
            f"deepspeed was imported from {getattr(known, '__file__', 'elsewhere')} before the look-alike "
            "was asked for; start the script with 'zero-ext run --deepspeed-compat', which asks first"
        )
    sys.meta_path.insert(0, LookAlikeFinder())
    # Availability is also probed by a look into sys.modules.
    importlib.import_module(NAME)
