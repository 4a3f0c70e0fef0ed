"""Where optimizer state lives: fp32 master weights and moments of the elements one rank owns of a unit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch

from zero_ext.config import Tier
from zero_ext.offload.shard_home import allocate
from zero_ext.offload.stored_run import Values

MASTER = "master"


class StateHome(Protocol):
    """Named values [numel], one an element: ``master`` from the start, others as an optimizer adds them."""

    tier: Tier
    numel: int

    def add(self, kind: str, dtype: torch.dtype) -> None:
        """Gives every element one more value, zero at first. Once a kind, before the first step."""

    def spans(self) -> Iterator[tuple[int, int]]:
        """The ranges in which the state is best visited; they cover it in order."""

    def read(self, kind: str, begin: int, end: int) -> torch.Tensor:
        """The values of elements [begin, end): live memory where the tier is memory, else a copy."""

    def run(self, kind: str, begin: int, end: int) -> Values:
        """The values of elements [begin, end) where they lie."""

    def edit(self, kind: str, begin: int, end: int) -> contextlib.AbstractContextManager[torch.Tensor]:
        """The values of elements [begin, end), to be changed; what was changed is kept when the block ends
        without an exception."""

    def memory_bytes(self) -> int:
        """Bytes of device or host memory behind it."""


class MemoryState:
    """State in device or host memory. ``values`` by kind are live tensors [numel]."""

    def __init__(self, tier: Tier, master: torch.Tensor) -> None:
        self.tier = tier
        self.numel = master.numel()
        self.values = {MASTER: master}

    def add(self, kind: str, dtype: torch.dtype) -> None:
        """See :class:`StateHome`."""
        self.values[kind] = allocate(self.numel, dtype)

    def spans(self) -> Iterator[tuple[int, int]]:
        """See :class:`StateHome`: one."""
        yield 0, self.numel

    def read(self, kind: str, begin: int, end: int) -> torch.Tensor:
        """See :class:`StateHome`."""
        return self.values[kind][begin:end]

    def run(self, kind: str, begin: int, end: int) -> Values:
        """See :class:`StateHome`."""
        return self.values[kind][begin:end]

    @contextlib.contextmanager
    def edit(self, kind: str, begin: int, end: int) -> Iterator[torch.Tensor]:
        """See :class:`StateHome`: changes are live at once."""
        yield self.values[kind][begin:end]

    def memory_bytes(self) -> int:
        """See :class:`StateHome`."""
        return sum(values.nbytes for values in self.values.values())
