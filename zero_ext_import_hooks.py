"""What zero_ext changes for other libraries in processes that never import it themselves.

With ``ZERO_EXT_DEEPSPEED_COMPAT=1`` in the environment ``import deepspeed`` gives zero_ext, and with
``ZERO_EXT_SHARD_TRAINERS=1`` every Trainer of transformers and every Accelerator shards its models. Where one
of them is set, a ``.pth`` file that is installed with zero_ext calls :func:`start` when Python starts. So
they reach processes that a launcher starts.

This module lies outside the package, whose import takes time. It imports nothing at the start that a file of
the working folder could stand in for: ``accelerate launch`` puts that folder on PYTHONPATH.
"""

import os
import sys

# Nor typing and __future__: type checkers know the name, and annotations are strings.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from importlib.metadata import Distribution, DistributionFinder
    from types import ModuleType

VARIABLE = "ZERO_EXT_DEEPSPEED_COMPAT"
TRAINERS_VARIABLE = "ZERO_EXT_SHARD_TRAINERS"
NAME = "deepspeed"
# The release of DeepSpeed whose names and signatures zero_ext has.
API_VERSION = "0.19.8"
_PACKAGE = "zero_ext"


class Finder:
    """Finds ``deepspeed`` and its modules in zero_ext, and a distribution of that name and of DeepSpeed's
    version."""

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """A spec for every module that is served or refused; None for all others."""
        if fullname == NAME:
            return _spec(fullname, _First())
        if not fullname.startswith(f"{NAME}."):
            return None
        loader = _loader_of(fullname)
        return None if loader is None else _spec(fullname, loader)

    def find_distributions(
        self, context: "DistributionFinder.Context | None" = None
    ) -> "Iterator[Distribution]":
        """The distribution, if it is asked for by name or with all others."""
        name = getattr(context, "name", None)
        if name is None or name.lower() == NAME:
            yield _distribution()


_INTEGRATIONS = f"{_PACKAGE}.integrations"
# Modules of other libraries, and what to call once they are imported.
_SHARDED = {
    "transformers.trainer": (f"{_INTEGRATIONS}.transformers.shard_trainers", "shard_all_trainers"),
    "accelerate": (f"{_INTEGRATIONS}.shard_accelerators", "shard_all_accelerators"),
}


class TrainerFinder:
    """Has the modules of the Trainer and the Accelerator, once imported, call what shards their models."""

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """The spec that the other finders have; None for all other modules."""
        if fullname not in _SHARDED:
            return None
        for finder in sys.meta_path:
            found = getattr(finder, "find_spec", None)  # which Python does without, too
            spec = None if finder is self or found is None else found(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _TrainerLoader(spec.loader)
                return spec
        return None


class _TrainerLoader:
    def __init__(self, plain: "Loader") -> None:
        self._plain = plain

    def __getattr__(self, name: str) -> object:
        if name == "_plain":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._plain, name)

    def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
        return self._plain.create_module(spec)

    def exec_module(self, module: "ModuleType") -> None:
        self._plain.exec_module(module)
        _import_package()
        from importlib import import_module

        name, function = _SHARDED[module.__name__]
        getattr(import_module(name), function)()


class _First:
    """Imports zero_ext when ``deepspeed`` is imported, not when a library asks whether it is installed."""

    def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
        found = _loader_of(NAME)
        if found is None:
            raise AssertionError(f"{NAME} is not served")
        self._loader = found
        return found.create_module(spec)

    def exec_module(self, module: "ModuleType") -> None:
        self._loader.exec_module(module)


def _spec(fullname: str, loader: "Loader | _First") -> "ModuleSpec":
    from importlib.machinery import ModuleSpec

    return ModuleSpec(fullname, loader, origin=_PACKAGE, is_package=True)  # type: ignore[arg-type]


def _loader_of(fullname: str) -> "Loader | None":
    _import_package()
    from zero_ext.integrations.deepspeed.import_alias import loader_of

    return loader_of(fullname)


def _import_package() -> None:
    """Import the zero_ext beside this file, also where the working folder has a ``zero_ext.py``."""
    if _PACKAGE in sys.modules:
        return
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec
    from pathlib import Path

    spec = PathFinder.find_spec(_PACKAGE, [str(Path(__file__).resolve().parent)])
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(
            f"{NAME}: expected {_PACKAGE} beside {__file__}, got none. Install it again."
        )
    sys.modules[_PACKAGE] = module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[_PACKAGE]
        raise


def _distribution() -> "Distribution":
    """What package metadata says of DeepSpeed: name and version."""
    from importlib.metadata import Distribution

    class LookAlike(Distribution):
        def read_text(self, filename: str) -> str | None:
            if filename != "METADATA":
                return None
            summary = "zero_ext under DeepSpeed's names"
            return f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {API_VERSION}\nSummary: {summary}\n"

        def locate_file(self, path: object) -> None:  # type: ignore[override]  # there are no files
            return None

    return LookAlike()


def start() -> None:
    """Insert the finders with a variable that is 1.

    Raises:
        ValueError: one is neither 1 nor 0 nor empty. Python prints that and starts without its finder.
    """
    _insert(Finder, VARIABLE, os.environ.get(VARIABLE, ""))
    _insert(TrainerFinder, TRAINERS_VARIABLE, os.environ.get(TRAINERS_VARIABLE, ""))


def _insert(kind: "type[Finder | TrainerFinder]", variable: str, value: str) -> None:
    if value not in ("", "0", "1"):
        raise ValueError(f"{variable}: expected 1 or 0, got {value!r}. Set it to 1, or unset it.")
    # Python reads the file twice in a virtual environment.
    if value == "1" and not any(isinstance(finder, kind) for finder in sys.meta_path):
        sys.meta_path.insert(0, kind())
