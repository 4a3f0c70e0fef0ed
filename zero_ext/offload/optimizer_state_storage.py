"""Where optimizer state lives: fp32 master weights and moments of the elements one rank owns of a unit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from zero_ext.config import Tier
from zero_ext.offload.device.device_memory import Device
from zero_ext.offload.storage_range import Values

MASTER = "master"


class StateField(NamedTuple):
    """One kind of state: an entry of ``dtype`` for every ``elements`` elements, the last ones rounded up."""

    dtype: torch.dtype
    elements: int = 1

    def entries(self, elements: int) -> int:
        """Entries of a range of ``elements`` elements."""
        return -(-elements // self.elements)


class StateHome(Protocol):
    """Kinds of state of ``numel`` elements: ``master`` from the start, others as an optimizer adds them.

    Ranges of elements begin where an entry of the kind does, and end so or at ``numel``.
    """

    tier: Tier
    numel: int

    def add(self, kind: str, field: StateField) -> None:
        """Adds a kind of state, zero at first. Once a kind, before the first step."""

    def spans(self) -> Iterator[tuple[int, int]]:
        """The ranges in which the state is best visited; they cover it in order."""

    def read(self, kind: str, begin: int, end: int) -> torch.Tensor:
        """The values of elements [begin, end): live memory where the tier is memory, else a copy."""

    def read_kinds(self, kinds: Sequence[str], begin: int, end: int) -> list[torch.Tensor]:
        """:meth:`read` of several kinds, in one transfer."""

    def write_kinds(self, kinds: Sequence[str], begin: int, end: int, values: Sequence[torch.Tensor]) -> None:
        """Replaces several kinds of the elements [begin, end), in one transfer."""

    def run(self, kind: str, begin: int, end: int) -> Values:
        """The values of elements [begin, end) where they lie."""

    def edit(self, kind: str, begin: int, end: int) -> contextlib.AbstractContextManager[torch.Tensor]:
        """The values of elements [begin, end), to be changed; what was changed is kept when the block ends
        without an exception."""

    def keep(self) -> None:
        """A step begins that may be taken back: the values of now are kept beside those after it until
        :meth:`settle` or :meth:`take_back`. Meanwhile values are not read or edited from elsewhere."""

    def settle(self) -> None:
        """The step since :meth:`keep` counts. Nothing happens if there is none."""

    def take_back(self) -> None:
        """Every value is what it was at :meth:`keep`, bit for bit."""

    def held_bytes(self) -> int:
        """Bytes it takes in its tier."""


class MemoryState:
    """State in device or host memory. ``values`` by kind are live tensors [numel]."""

    def __init__(self, tier: Tier, master: torch.Tensor, device: Device) -> None:
        self.tier = tier
        self._device = device
        self.numel = master.numel()
        self.values = {MASTER: master}
        self._fields = {MASTER: StateField(torch.float32)}
        self._kept: dict[str, torch.Tensor] = {}

    def add(self, kind: str, field: StateField) -> None:
        """See :class:`StateHome`."""
        self._fields[kind] = field
        self.values[kind] = self._device.allocate(self.tier, field.entries(self.numel), field.dtype)

    def spans(self) -> Iterator[tuple[int, int]]:
        """See :class:`StateHome`: one."""
        yield 0, self.numel

    def read(self, kind: str, begin: int, end: int) -> torch.Tensor:
        """See :class:`StateHome`."""
        field = self._fields[kind]
        if begin % field.elements or (end % field.elements and end != self.numel):
            raise AssertionError(
                f"elements [{begin}, {end}) cut the entries of '{kind}', one for every {field.elements}"
            )
        return self.values[kind][field.entries(begin) : field.entries(end)]

    def read_kinds(self, kinds: Sequence[str], begin: int, end: int) -> list[torch.Tensor]:
        """See :class:`StateHome`."""
        return [self.read(kind, begin, end) for kind in kinds]

    def write_kinds(self, kinds: Sequence[str], begin: int, end: int, values: Sequence[torch.Tensor]) -> None:
        """See :class:`StateHome`."""
        for kind, given in zip(kinds, values, strict=True):
            self.read(kind, begin, end).copy_(given)

    def run(self, kind: str, begin: int, end: int) -> Values:
        """See :class:`StateHome`."""
        return self.read(kind, begin, end)

    @contextlib.contextmanager
    def edit(self, kind: str, begin: int, end: int) -> Iterator[torch.Tensor]:
        """See :class:`StateHome`: changes are live at once."""
        yield self.read(kind, begin, end)

    def keep(self) -> None:
        """See :class:`StateHome`; the memory for it is allocated at the first call."""
        for kind, values in self.values.items():
            if kind not in self._kept:
                self._kept[kind] = self._device.allocate(self.tier, values.numel(), values.dtype)
            self._kept[kind].copy_(values)

    def settle(self) -> None:
        """See :class:`StateHome`."""

    def take_back(self) -> None:
        """See :class:`StateHome`."""
        for kind, values in self.values.items():
            values.copy_(self._kept[kind])

    def held_bytes(self) -> int:
        """See :class:`StateHome`."""
        return sum(values.nbytes for values in (*self.values.values(), *self._kept.values()))
