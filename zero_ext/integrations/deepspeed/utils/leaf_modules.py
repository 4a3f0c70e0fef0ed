"""Leaf modules of stage 3: gathered whole, with all they contain, as a mixture of experts wants it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from zero_ext.integrations.deepspeed.unsupported import names_of

_MARK = "_z3_leaf"


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: Iterable[type | str]) -> list[nn.Module]:
    """Mark the modules of these classes, given as classes or by name; before ``initialize``. Returns them.

    ``ValueError`` if there are none.
    """
    wanted = tuple(leaf_module_classes)

    def fits(_: str, module: nn.Module) -> bool:
        own = type(module)
        return any(item in (own, own.__name__, f"{own.__module__}.{own.__qualname__}") for item in wanted)

    return _mark(model, fits, f"of the classes {list(wanted)}")


def set_z3_leaf_modules_by_name(model: nn.Module, leaf_module_names: Iterable[str]) -> list[nn.Module]:
    """Mark the modules of these full names; see :func:`set_z3_leaf_modules`."""
    wanted = set(leaf_module_names)
    return _mark(model, lambda name, _: name in wanted, f"named {sorted(wanted)}")


def set_z3_leaf_modules_by_suffix(model: nn.Module, leaf_module_suffixes: Iterable[str]) -> list[nn.Module]:
    """Mark the modules with names that end so; see :func:`set_z3_leaf_modules`."""
    wanted = tuple(leaf_module_suffixes)
    return _mark(model, lambda name, _: name.endswith(wanted), f"with names that end in {list(wanted)}")


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module, or takes its mark away."""
    setattr(model, _MARK, bool(flag))


def unset_z3_leaf_modules(model: nn.Module, leaf_module_classes: Iterable[type | str]) -> list[nn.Module]:
    """Take the marks of these classes away; return the modules."""
    found = set_z3_leaf_modules(model, leaf_module_classes)
    for module in found:
        set_z3_leaf_module(module, False)
    return found


def z3_leaf_module(model: nn.Module) -> bool:
    """Return whether a module is marked."""
    return bool(getattr(model, _MARK, False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return all marked modules."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def leaf_modules_of(model: nn.Module) -> list[str]:
    """Return the full names of all marked modules."""
    return [name for name, module in model.named_modules() if z3_leaf_module(module)]


def _mark(model: nn.Module, fits: Callable[[str, nn.Module], bool], words: str) -> list[nn.Module]:
    found = [module for name, module in model.named_modules() if fits(name, module)]
    if not found:
        raise ValueError(f"{type(model).__name__}: it has no modules {words}. Name some of its modules.")
    for module in found:
        set_z3_leaf_module(module, True)
    return found


__getattr__ = names_of("deepspeed.utils.z3_leaf_module")
