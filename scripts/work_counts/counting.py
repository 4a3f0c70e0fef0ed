"""Counters of the work that a call does: opcodes, operations of torch, collectives and their bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import zero_ext
from tests.opcodes import count_opcodes
from zero_ext.comm.traffic_stats import CollectiveTraffic, TrafficStats

PACKAGE = str(Path(zero_ext.__file__).parent)
OPCODES, OPERATIONS, COLLECTIVES, BYTES = "opcodes", "torch operations", "collectives", "bytes sent"
UNITS = (OPCODES, OPERATIONS, COLLECTIVES, BYTES)
Counts = dict[str, int]


class _OperationCounter(TorchDispatchMode):
    """Counts operations without views, which compute nothing and which torch adds and drops by version."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


@contextmanager
def _recorded_traffic() -> Iterator[list[CollectiveTraffic]]:
    """Every collective of the process while this is open, of all its groups."""
    found: list[CollectiveTraffic] = []
    record = TrafficStats.record

    def also_record(stats: TrafficStats, traffic: CollectiveTraffic) -> None:
        found.append(traffic)
        record(stats, traffic)

    TrafficStats.record = also_record  # type: ignore[assignment]
    try:
        yield found
    finally:
        TrafficStats.record = record  # type: ignore[method-assign]


def opcodes_of(function: Callable[[], object]) -> Counts:
    """Opcodes that ``function`` executes in files of zero_ext, in this thread."""
    return {OPCODES: count_opcodes(function, PACKAGE)}


def operations_of(function: Callable[[], object]) -> Counts:
    """Operations of torch, forward and backward, and collectives with the bytes that this rank sends."""
    counter = _OperationCounter()
    with _recorded_traffic() as traffic, counter:
        function()
    return {
        OPERATIONS: counter.count,
        COLLECTIVES: len(traffic),
        BYTES: sum(each.bytes_sent for each in traffic),
    }


def warm_up_torch() -> None:
    """Load what torch imports at its first operation under a dispatch mode."""
    operations_of(lambda: torch.zeros(1) + 1)
