"""Some steps as a timeline: spans and memory, in the JSON that Perfetto and chrome://tracing read."""

from __future__ import annotations

import json
import time
import weakref
from pathlib import Path
from typing import Any

from zero_ext.config import TraceConfig
from zero_ext.config.events import (
    ActivationEnd,
    CollectiveEnd,
    Event,
    GatherEvent,
    PhaseEnd,
    ReleaseEvent,
    StepEnd,
    WaitEnd,
    collective_wait,
)
from zero_ext.monitor.dashboards import require
from zero_ext.monitor.file_writers import write_atomically
from zero_ext.monitor.memory_timeline import MemoryTimeline, draw
from zero_ext.zero.engine import Engine

_PHASES, _WAITS, _ACTIVATIONS = 1, 2, 3
_TRACKS = {_PHASES: "phases", _WAITS: "waits", _ACTIVATIONS: "activations"}


class Trace:
    """Record some steps of an engine as a trace for Chrome's viewer or Perfetto.

    A subscriber, on whatever rank it is used. It writes trace-rank{r}.json and, with `policy.plot`,
    memory-rank{r}.png, when the steps are over or at `close`. The file has a track of phases, one of waits,
    one of checkpointed calls (with `activation_checkpointing.profile`), one for every unit while it is
    gathered, and counters: bytes of each tier by kind, of gathered units, and of the process. Times are those
    of the host's monotonic clock, so traces of the ranks of one host fit together.

    Args:
        engine: its steps are recorded; held weakly.
        folder: of the files.
        policy: which steps (`steps` of them from `first_step` on), and whether to plot memory.

    Attributes:
        memory: the timeline of memory.
        is_written: whether the files are written.

    Raises:
        ModuleNotFoundError: a plot is asked for without matplotlib.
        OSError: the folder cannot be made. Later calls raise it where writing fails.
    """

    def __init__(self, engine: Engine, folder: str | Path, policy: TraceConfig) -> None:
        if policy.plot:
            require("matplotlib", "a plot of the memory timeline")
        self._engine = weakref.ref(engine)
        self._rank = engine.rank
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._first, self._last = policy.first_step, policy.first_step + policy.steps - 1
        self._plot = policy.plot
        self._step = engine.steps + 1
        self._itemsize = {unit.name: unit.layout.dtype.itemsize for unit in engine.units}
        self._spans: list[dict[str, Any]] = []
        self._gathered: dict[str, int] = {}
        self.memory = MemoryTimeline(self._rank)
        self.is_written = False
        if self._step == self._first:
            self._sample(at_rest=False)

    @property
    def path(self) -> Path:
        """The file that is written."""
        return self._folder / f"trace-rank{self._rank}.json"

    def __call__(self, event: Event) -> None:
        """Record an event if its step is to be recorded.

        Args:
            event: any event of the engine.
        """
        if self.is_written:
            return
        if self._first <= self._step <= self._last:
            self._record(event)
        if isinstance(event, StepEnd):
            self._step = event.step + 1
            if self._step == self._first:
                self._sample(at_rest=True)
            if event.step >= self._last:
                self.close()

    def close(self) -> None:
        """Write what was recorded, once; nothing if there is nothing."""
        if self.is_written or not self._spans:
            return
        self.is_written = True
        for unit in list(self._gathered):
            self._unit("e", unit)
        tracks = [("process_name", 0, f"rank {self._rank}")]
        tracks += [("thread_name", track, name) for track, name in _TRACKS.items()]
        names = [
            {"ph": "M", "name": what, "pid": self._rank, "tid": track, "args": {"name": name}}
            for what, track, name in tracks
        ]
        events = names + self._spans + self.memory.counters()
        text = json.dumps({"displayTimeUnit": "ms", "traceEvents": events})
        write_atomically(self.path, [text.encode()])
        if self._plot:
            phases = [span for span in self._spans if span.get("tid") == _PHASES]
            plot = draw(self.memory, phases)
            write_atomically(self._folder / f"memory-rank{self._rank}.png", [plot])

    def _record(self, event: Event) -> None:
        match event:
            case PhaseEnd():
                self._span(_PHASES, event.phase, event, step=self._step)
                self._sample(at_rest=False)
            case WaitEnd():
                self._span(_WAITS, event.what, event)
            case CollectiveEnd():
                facts = {"kind": event.kind, "what": event.label, "ranks": event.ranks}
                facts |= {"elements": event.elements, "bytes_sent": event.bytes_sent}
                self._span(_WAITS, collective_wait(event.kind), event, **facts)
            case ActivationEnd():
                self._span(_ACTIVATIONS, event.what, event, name=event.name, bytes=event.bytes)
            case GatherEvent():
                self._gathered[event.unit] = event.elements * self._itemsize[event.unit]
                self._unit("b", event.unit)
            case ReleaseEvent() if event.unit in self._gathered:  # else gathered before the recording began
                self._unit("e", event.unit)
            case StepEnd():
                self._sample(at_rest=True)

    def _span(
        self,
        track: int,
        label: str,
        event: PhaseEnd | WaitEnd | CollectiveEnd | ActivationEnd,
        **facts: object,
    ) -> None:
        times = {"ts": event.began * 1e6, "dur": event.seconds * 1e6}
        self._spans.append(
            {"ph": "X", "name": label, "pid": self._rank, "tid": track, **times, "args": facts}
        )

    def _unit(self, what: str, name: str) -> None:
        now, facts = time.perf_counter(), {"bytes": self._gathered[name]}
        ids = {"ph": what, "cat": "gathered", "id": name, "name": name}
        self._spans.append({**ids, "pid": self._rank, "ts": now * 1e6, "args": facts})
        if what == "e":
            del self._gathered[name]
        self.memory.live.append((now, sum(self._gathered.values())))

    def _sample(self, at_rest: bool) -> None:
        engine = self._engine()
        # While a delayed update runs beside the training its state must not be looked at.
        if engine is not None and (at_rest or not engine.updates.in_progress):
            self.memory.sample(engine)
