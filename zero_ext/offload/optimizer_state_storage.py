"""Storage of optimizer state: fp32 master weights and moments of the elements one rank owns of a unit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from zero_ext.config import Tier
from zero_ext.config.internal_error import zero_ext_bug
from zero_ext.offload.device_memory import Device
from zero_ext.offload.shard_storage import Values

MASTER = "master"


def awake(values: torch.Tensor) -> torch.Tensor:
    """Return ``values``. ``RuntimeError`` if their memory was moved away."""
    if values.numel() and not values.untyped_storage().nbytes():
        raise asleep_error("optimizer state")
    return values


def asleep_error(what: str) -> RuntimeError:
    """Return the error of ``what``, which needs optimizer state that was moved away."""
    return RuntimeError(
        f"{what}: expected optimizer state that is awake, got state that sleeps in host memory. Call "
        "zero_ext.wake(model) first."
    )


class StateField(NamedTuple):
    """One kind of state: an entry of ``dtype`` for every ``elements`` elements, the last ones rounded up."""

    dtype: torch.dtype
    elements: int = 1

    def entries(self, elements: int) -> int:
        """Entries of a range of ``elements`` elements."""
        return -(-elements // self.elements)


class OptimizerStateStorage(Protocol):
    """Kinds of state of ``numel`` elements: ``master`` from the start, others as an optimizer adds them.

    Ranges of elements begin where an entry of the kind does, and end so or at ``numel``.
    """

    tier: Tier
    numel: int

    def add(self, kind: str, field: StateField) -> None:
        """Add a kind of state, zero at first. Called once per kind, before the first step."""

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yield the ranges in which the state is best visited. They cover it in order."""

    def read(self, kind: str, begin: int, end: int) -> torch.Tensor:
        """Return the values of elements [begin, end): live memory where the tier is memory, else a copy."""

    def read_kinds(self, kinds: Sequence[str], begin: int, end: int) -> list[torch.Tensor]:
        """Return :meth:`read` of several kinds, in one transfer."""

    def write_kinds(self, kinds: Sequence[str], begin: int, end: int, values: Sequence[torch.Tensor]) -> None:
        """Replace several kinds of the elements [begin, end), in one transfer."""

    def view(self, kind: str, begin: int, end: int) -> Values:
        """Return the values of elements [begin, end) where they are stored."""

    @contextlib.contextmanager
    def edit(self, kind: str, begin: int, end: int) -> Iterator[torch.Tensor]:
        """Return the values of elements [begin, end), to be changed.

        Changes are stored when the block ends without an exception.
        """
        values = self.read(kind, begin, end)
        yield values
        self.write_kinds([kind], begin, end, [values])

    def snapshot(self) -> None:
        """Keep the current values until :meth:`commit` or :meth:`rollback` ends the step.

        Meanwhile values are not read or edited from elsewhere.
        """

    def commit(self) -> None:
        """Accept the step since :meth:`snapshot`. Do nothing if there is none."""

    def rollback(self) -> None:
        """Restore every value as it was at :meth:`snapshot`, bit for bit."""

    def allocated_bytes(self) -> int:
        """Return the bytes allocated in its tier."""


class MemoryState(OptimizerStateStorage):
    """State in device or host memory. ``values`` by kind are live tensors [numel]."""

    def __init__(self, tier: Tier, master: torch.Tensor, device: Device) -> None:
        self.tier = tier
        self._device = device
        self.numel = master.numel()
        self.values = {MASTER: master}
        self._fields = {MASTER: StateField(torch.float32)}
        self._snapshots: dict[str, torch.Tensor] = {}

    def add(self, kind: str, field: StateField) -> None:
        self._fields[kind] = field
        self.values[kind] = self._device.allocate(self.tier, field.entries(self.numel), field.dtype)

    def spans(self) -> Iterator[tuple[int, int]]:
        yield 0, self.numel

    def read(self, kind: str, begin: int, end: int) -> torch.Tensor:
        field = self._fields[kind]
        if begin % field.elements or (end % field.elements and end != self.numel):
            raise zero_ext_bug(
                f"elements [{begin}, {end}) cut the entries of '{kind}', one for every {field.elements}"
            )
        return awake(self.values[kind])[field.entries(begin) : field.entries(end)]

    def read_kinds(self, kinds: Sequence[str], begin: int, end: int) -> list[torch.Tensor]:
        return [self.read(kind, begin, end) for kind in kinds]

    def write_kinds(self, kinds: Sequence[str], begin: int, end: int, values: Sequence[torch.Tensor]) -> None:
        for kind, replacement in zip(kinds, values, strict=True):
            self.read(kind, begin, end).copy_(replacement)

    def view(self, kind: str, begin: int, end: int) -> Values:
        return self.read(kind, begin, end)

    @contextlib.contextmanager
    def edit(self, kind: str, begin: int, end: int) -> Iterator[torch.Tensor]:
        yield self.read(kind, begin, end)

    def snapshot(self) -> None:
        """Copy the values. Memory for them is allocated at the first call."""
        for kind, values in self.values.items():
            if kind not in self._snapshots:
                self._snapshots[kind] = self._device.allocate(self.tier, values.numel(), values.dtype)
            self._snapshots[kind].copy_(values)

    def commit(self) -> None:
        """Do nothing: the step wrote to the values."""

    def rollback(self) -> None:
        for kind, values in self.values.items():
            values.copy_(self._snapshots[kind])

    def allocated_bytes(self) -> int:
        return sum(values.nbytes for values in (*self.values.values(), *self._snapshots.values()))
