"""Running calls: what each call of a block touched, and when it may be released."""

from __future__ import annotations

from torch import nn

from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.zero.units.unit import Unit


class BlockCall:
    """One call of a block: a holder of units, in forward and again in its backward.

    ``inputs`` counts the block's gradient-requiring inputs, ``awaited`` those without a gradient yet
    in this backward pass; at zero the backward of this call is over and its units may go. ``repeats`` says
    that backward runs a call of the forward again; ``has_leaf_inputs`` that the gradient of an input may
    arrive before those of the parameters; ``alone`` that no block runs around the module, which is none.
    Of the units that it ``touched``, backward needs those that it ``rereads``.
    """

    def __init__(self, block: nn.Module, name: str, repeats: bool, alone: bool = False) -> None:
        self.block = block
        self.name = name
        self.repeats = repeats
        self.alone = alone
        self.touched: list[Unit] = []
        self.rereads: list[Unit] = []
        self.inputs = 0
        self.has_leaf_inputs = False
        self.awaited = 0

    @property
    def looks_up(self) -> bool:
        """Return whether backward needs nothing of what the call needed."""
        return bool(self.touched) and not self.rereads

    def touch(self, unit: Unit, again: bool) -> None:
        """Note that the call needs ``unit``; ``again``: its backward too."""
        if unit not in self.touched:
            self.touched.append(unit)
        if again and unit not in self.rereads:
            self.rereads.append(unit)


class CallStack:
    """The calls that are running now, innermost last."""

    def __init__(self) -> None:
        self._calls: list[BlockCall] = []

    def __bool__(self) -> bool:
        return bool(self._calls)

    def push(self, call: BlockCall) -> None:
        """Enter ``call``."""
        self._calls.append(call)

    def pop(self, block: nn.Module) -> BlockCall:
        """Leave the innermost call of ``block``, and with it calls inside that an exception has ended."""
        while self._calls:
            call = self._calls.pop()
            if call.block is block:
                return call
        raise zero_ext_bug(f"{type(block).__name__} left a call that it never entered")

    def runs_alone(self, block: nn.Module) -> bool:
        """Return whether the innermost call is one of ``block`` by itself."""
        return bool(self._calls) and self._calls[-1].alone and self._calls[-1].block is block

    def holder_for(self, block: nn.Module | None) -> BlockCall:
        """Return the call that shall hold a unit of ``block``: the running call of ``block``, else the
        innermost.
        """
        for call in reversed(self._calls):
            if call.block is block:
                return call
        return self._calls[-1]
