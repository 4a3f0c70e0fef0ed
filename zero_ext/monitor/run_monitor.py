"""A monitor: rows of a step's values, from sources to writers."""

from __future__ import annotations

import os
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from zero_ext.config.events import DeviceStepEnd, Event, StepEnd, Subscriber
from zero_ext.monitor.metric_row import Source, Value, Writer, facts_of
from zero_ext.monitor.sources.step_times import PHASES
from zero_ext.zero.engine import Engine


class Monitor:
    """Make a row of values at the end of every `log_interval`-th step, for `writers`.

    A row has the values of `StepEnd`, those of each of `sources`, and what `log` was given. On an
    accelerator it waits for what the device reports at the end of a later step: its loss, and
    `device/forward`, `device/backward`, `device/step` in seconds of its stream.

    A writer, source or subscriber that raises is left out from then on, with a warning that says why:
    training on all ranks is worth more than a line of a log on one. The engine is held weakly. When it goes,
    and at the interpreter's exit, the monitor is closed.

    Args:
        engine: its steps are recorded.
        writers: get every row.
        sources: give values.
        subscribers: get all events, after the sources, and are closed with the monitor if they can be.
        log_interval: steps from row to row.

    Attributes:
        subscribers: those that have not failed.
    """

    def __init__(
        self,
        engine: Engine,
        writers: Sequence[Writer] = (),
        sources: Sequence[Source] = (),
        subscribers: Sequence[Subscriber] = (),
        log_interval: int = 1,
    ) -> None:
        self.subscribers = tuple(subscribers)
        self._writers = tuple(writers)
        self._sources = tuple(sources)
        self._log_interval = log_interval
        self._follows = engine.device.type != "cpu"
        self._said: dict[str, Value] = {}
        self._open: deque[tuple[int, dict[str, Value]]] = deque()  # rows that are not complete yet
        self._engine = weakref.ref(engine)
        self._process = os.getpid()
        self._closing = weakref.finalize(engine, self._end)
        engine.subscribe(self)

    def log(self, **values: Value) -> None:
        """Add values to the row of the running step, before `optimizer.step()`.

        Such as the `loss` of a loop that calls `loss.backward()` itself, or tokens.

        Args:
            **values: by name.
        """
        self._said.update(values)
        loss = values.get("loss")
        if isinstance(loss, float | int):
            for each in self.subscribers:
                if hasattr(each, "show_loss"):
                    each.show_loss(float(loss))

    def __call__(self, event: Event) -> None:
        """Pass an event on, and write the rows that it completes.

        Args:
            event: any event of the engine.
        """
        for source in self._sources:
            self._attempt(source, partial(source, event))
        for each in self.subscribers:
            self._attempt(each, partial(each, event))
        if isinstance(event, DeviceStepEnd):
            self._complete(event)
        elif isinstance(event, StepEnd):
            said, self._said = self._said, {}
            if event.step % self._log_interval == 0 and self._writers:
                self._open.append((event.step, {**self._row(event), **said}))
                if not self._follows:
                    self._write()

    def close(self) -> None:
        """Write what is left and close everything; calling it again does nothing."""
        engine = self._engine()
        if engine is not None:
            engine.unsubscribe(self)
        self._closing()

    def _end(self) -> None:
        if os.getpid() != self._process:
            return  # a child that was forked
        while self._open:
            self._write()
        for each in (*self._writers, *self.subscribers):
            if hasattr(each, "close"):
                self._attempt(each, each.close)

    def _row(self, event: StepEnd) -> dict[str, Value]:
        row = facts_of(event)
        for source in self._sources:
            self._attempt(source, lambda source=source: row.update(source.values(event)))  # type: ignore[misc]
        if self._follows:
            row.update({f"device/{phase}": None for phase in PHASES})
        return row

    def _complete(self, event: DeviceStepEnd) -> None:
        """Fill in what came from the device, and write the rows up to that step."""
        for step, row in self._open:
            if step == event.step:
                row.update({f"device/{phase}": seconds for phase, seconds in event.seconds.items()})
                for name, value in (("loss", event.loss), ("grad_norm", event.grad_norm)):
                    row[name] = value if row[name] is None else row[name]
        while self._open and self._open[0][0] <= event.step:
            self._write()

    def _write(self) -> None:
        _, row = self._open.popleft()
        for writer in self._writers:
            self._attempt(writer, partial(writer.write, row))

    def _attempt(self, who: object, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._sources = tuple(each for each in self._sources if each is not who)
            self._writers = tuple(each for each in self._writers if each is not who)
            self.subscribers = tuple(each for each in self.subscribers if each is not who)
            warnings.warn(
                f"{type(who).__name__} failed and is left out from now on; training goes on. "
                f"{type(error).__name__}: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
