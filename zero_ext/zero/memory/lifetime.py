"""Objects that are ended while references to them exist, and weak references to methods."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec

_REASON = "_zero_ext_ended"
_Arguments = ParamSpec("_Arguments")


class Ending:
    """An object that :func:`end` may end while others still refer to it."""

    if not TYPE_CHECKING:  # else every name would be known to the type checker

        def __getattr__(self, name: str) -> object:
            # Methods come from the class and are still found, so the error is raised where one of
            # them first reads an attribute of the object.
            refuse_ended(self)
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")


def end(ended: object, reason: str) -> None:
    """Drop all that ``ended`` refers to. Its methods raise ``RuntimeError`` with ``reason`` from now on."""
    vars(ended).clear()
    vars(ended)[_REASON] = reason


def refuse_ended(asked: object) -> None:
    """Raise ``RuntimeError`` if ``asked`` was ended."""
    if (reason := vars(asked).get(_REASON)) is not None:
        raise RuntimeError(reason)


def weakly(method: Callable[_Arguments, None]) -> Callable[_Arguments, None]:
    """Return ``method`` as a function that does not keep its object alive."""
    weak = weakref.WeakMethod(method)

    def call(*arguments: _Arguments.args, **named: _Arguments.kwargs) -> None:
        if (alive := weak()) is not None:
            alive(*arguments, **named)

    return call
