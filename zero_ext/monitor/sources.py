"""The values of one step by name, which sources make and writers write; its bytes and its times."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Mapping
from typing import Protocol

import torch

from zero_ext.config.events import (
    COLLECTIVE_KINDS,
    CollectiveEnd,
    Event,
    PhaseEnd,
    StepEnd,
    WaitEnd,
    collective_wait,
    persistent_kind,
)
from zero_ext.monitor.process_memory import resident_bytes
from zero_ext.zero.engine import Engine

Value = float | int | None | tuple[float, ...]
Row = Mapping[str, Value]

FACTS = ("step", "loss", "grad_norm", "lr", "skipped", "loss_scale", "seconds")
PHASES = ("forward", "backward", "step")
WAITS = ("gather", "reduce", "agreement", "storage", "update")


class Source(Protocol):
    """Receives every event of an engine and reports values of the step that ended last."""

    def __call__(self, event: Event) -> None:
        """Take an event."""

    def values(self, end: StepEnd) -> Row:
        """Values of the step that ``end`` reports, the same names for every step."""


class Writer(Protocol):
    """Writes rows somewhere, each whole when `write` returns."""

    def write(self, row: Row) -> None:
        """Write the values of a step; "step" is always among them. None means unknown."""

    def close(self) -> None:
        """End what is open."""


def facts_of(end: StepEnd) -> dict[str, Value]:
    """Return what a `StepEnd` itself says."""
    return {name: getattr(end, name) for name in FACTS} | {"skipped": int(end.skipped)}


class StepTimes:
    """Source of the seconds that a step's phases took, and that the host waited in them.

    `time/forward`, `time/backward` and `time/step` are the phases, `time/other` is the rest of
    `seconds`: data, the loss, whatever else the loop does. `wait/gather` (parameters, partitioned
    activations), `wait/reduce` (gradients), `wait/agreement` (norms, flags), `wait/storage` (NVMe)
    and `wait/update` (a delayed one) are part of these and never overlap. On an accelerator all of them
    are the host's times. A monitor's rows have those of its stream as well.
    """

    def __init__(self) -> None:
        self._running: defaultdict[str, float] = defaultdict(float)
        self._last: Mapping[str, float] = {}

    def __call__(self, event: Event) -> None:
        """Add up times.

        Args:
            event: any event of an engine.
        """
        if isinstance(event, PhaseEnd):
            self._running[f"time/{event.phase}"] += event.seconds
        elif isinstance(event, WaitEnd):
            self._running[f"wait/{event.what}"] += event.seconds
        elif isinstance(event, CollectiveEnd):
            self._running[f"wait/{collective_wait(event.kind)}"] += event.seconds
        elif isinstance(event, StepEnd):
            self._last, self._running = self._running, defaultdict(float)

    def values(self, end: StepEnd) -> dict[str, Value]:
        """Return the times of a step.

        Args:
            end: the end of the step.

        Returns:
            Seconds by name.
        """
        phases = {f"time/{phase}": self._last.get(f"time/{phase}", 0.0) for phase in PHASES}
        waits = {f"wait/{wait}": self._last.get(f"wait/{wait}", 0.0) for wait in WAITS}
        return {**phases, "time/other": max(0.0, end.seconds - sum(phases.values())), **waits}


class EngineBytes:
    """Source of the bytes that this rank holds at the end of a step, and that it moved in it.

    `memory/device`, `memory/host` and `memory/nvme` are the engine's memory breakdown by tier,
    `memory/process` is the process's resident set. On an accelerator, `memory/allocated` and
    `memory/peak` are what torch's allocator holds now and held at most. `traffic/...` are bytes sent by
    kind of collective, including units below the persistence threshold. `traffic/inter_node` are bytes of
    all kinds sent to other nodes, where there are several. `transfer/A_to_B` are bytes moved between tiers.

    Args:
        engine: the owner of the bytes; held weakly.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)

    def __call__(self, event: Event) -> None:
        """Do nothing: all is read from the engine.

        Args:
            event: any event of the engine.
        """

    def values(self, end: StepEnd) -> dict[str, Value]:
        """Return the bytes of a step.

        Args:
            end: the end of the step.

        Returns:
            Bytes by name; empty once the engine is gone.
        """
        engine = self._engine()
        if engine is None:
            return {}
        tiers = engine.memory_by_tier(wait=False)
        held: dict[str, Value] = {f"memory/{tier}": sum(kinds.values()) for tier, kinds in tiers.items()}
        held["memory/process"] = resident_bytes()
        if engine.device.type != "cpu":
            held["memory/allocated"] = torch.accelerator.memory_allocated(engine.device)
            held["memory/peak"] = torch.accelerator.max_memory_allocated(engine.device)
        sent = engine.traffic.last_bytes_sent
        for name, kind in COLLECTIVE_KINDS.items():
            if kind.in_rows:
                held[f"traffic/{name}"] = sent[name] + sent[persistent_kind(name)]
        if engine.collectives.nodes.nodes > 1:
            held["traffic/inter_node"] = engine.traffic.last_crossing_bytes.total()
        moved = engine.tiers.transfers.last_moved
        return held | {f"transfer/{tier}_to_{to}": nbytes for (tier, to), nbytes in sorted(moved.items())}
