"""Errors of one rank that wait until all ranks can hear of them, so that none is left in a collective."""

from __future__ import annotations

from collections.abc import Callable

from zero_ext.comm import Collectives
from zero_ext.zero.units.collective_errors import together


class Postponed:
    """The first error of what was attempted; nothing is attempted after it. True once there is one."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __bool__(self) -> bool:
        return self.error is not None

    def attempt(self, action: Callable[[], object]) -> None:
        """Does ``action``, unless something failed before; keeps the error if it fails."""
        if self.error is None:
            try:
                action()
            except Exception as error:
                self.error = error

    def settle(self, collectives: Collectives, what: str, advice: str = "") -> None:
        """Raise ``FailedTogether`` on all ranks if any has an error. This is a collective. ``what`` was
        attempted; ``advice`` ends the message."""
        together(collectives, self._raise, what, advice)

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error
