"""A monitor: rows of a step's values, from sources to writers, and how a configuration asks for one."""

from __future__ import annotations

import os
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from torch import nn

from zero_ext.config import MonitorConfig
from zero_ext.config.events import DeviceStepEnd, Event, StepEnd, Subscriber
from zero_ext.monitor.dashboards import TensorBoard, WandbRun, require
from zero_ext.monitor.file_writers import CommsLog, CsvFile, JsonLines
from zero_ext.monitor.flops import Flops
from zero_ext.monitor.progress import ProgressLine, StepLog, on_a_terminal
from zero_ext.monitor.sources import PHASES, EngineBytes, Source, StepTimes, Value, Writer, facts_of
from zero_ext.monitor.trace import Trace
from zero_ext.zero.api.engine_lookup import engine_of
from zero_ext.zero.engine import Engine
from zero_ext.zero.units.collective_errors import raise_on_all_ranks

_NOTHING = MonitorConfig(jsonl=False, timing=False, memory=False)


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


def check_packages(policy: MonitorConfig | None) -> None:
    """Raise ``ModuleNotFoundError`` with the install line for a package that ``policy`` needs and that is
    not there. On every rank alike, before anything else happens."""
    policy = policy or _NOTHING
    if policy.tensorboard:
        require("tensorboard", "monitor.tensorboard")
    if policy.wandb is not None:
        require("wandb", "monitor.wandb")
    if policy.trace is not None and policy.trace.plot:
        require("matplotlib", "monitor.trace.plot")


def attach(
    model: nn.Module, policy: MonitorConfig | None = None, *, steps_per_print: int | None = None
) -> Monitor | None:
    """Open what `policy` asks for on this rank and subscribe it to the engine of `model`; a collective.

    Rank 0 writes rows, lines and the progress bar, every rank its trace. `prepare` and `initialize` call
    it with the configuration's `monitor` section. The monitor closes itself when the model goes and at
    exit.

    Args:
        model: a prepared model.
        policy: what to write; default nothing but `steps_per_print`.
        steps_per_print: steps from line to line on stderr; default no lines.

    Returns:
        The monitor; None on ranks with nothing to do.

    Raises:
        ModuleNotFoundError: a package is missing, with the install line.
        RuntimeError: something cannot be opened on some rank, on all of them.
        ValueError: the model has a monitor already.
    """
    engine = engine_of(model)
    check_packages(policy)
    if monitor_of(model) is not None:
        raise ValueError(
            "model: expected no open monitor, got a model that has one. Close it first: "
            "monitor_of(model).close()."
        )
    return raise_on_all_ranks(
        engine.collectives,
        lambda: _open(engine, policy or _NOTHING, steps_per_print),
        "opening the monitors",
        "Training did not begin.",
    )


def monitor_of(model: nn.Module) -> Monitor | None:
    """Return the monitor that `prepare`, `initialize` or `attach` gave to `model` on this rank.

    Args:
        model: a prepared model.

    Returns:
        The monitor; None if there is none.
    """
    return next((each for each in engine_of(model).subscribers if isinstance(each, Monitor)), None)


def subscribe(model: nn.Module, *subscribers: Subscriber) -> None:
    """Publish the events of a prepared model on this rank to `subscribers` from now on.

    Args:
        model: a prepared model.
        *subscribers: called with each event.

    Examples:
        >>> from zero_ext.monitor import CsvFile, subscribe
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = zero_ext.prepare(model, optimizer, {"stage": 3})
        >>> with CsvFile("steps.csv") as csv:
        ...     subscribe(model, csv)
        ...     model(torch.ones(2, 4)).sum().backward()
        ...     optimizer.step()
        >>> csv.path.read_text().splitlines()[0]
        'step,loss,grad_norm,lr,skipped,loss_scale,seconds'
    """
    engine = engine_of(model)
    for subscriber in subscribers:
        engine.subscribe(subscriber)


def _open(engine: Engine, policy: MonitorConfig, steps_per_print: int | None) -> Monitor | None:
    subscribers: list[Subscriber] = []
    writers: list[Writer] = []
    sources: list[Source] = []
    if engine.rank == 0:
        writers = _writers(engine, policy)
        if policy.timing:
            sources.append(StepTimes())
        if policy.memory:
            sources.append(EngineBytes(engine))
        if policy.flops is not None:
            sources.append(Flops(engine, policy.flops.peak, policy.flops.per_step))
        if steps_per_print is not None:
            subscribers.append(StepLog(steps_per_print, sources))
        if policy.progress is not None and on_a_terminal():
            steps, tokens = policy.progress.steps, policy.progress.tokens_per_step
            subscribers.append(ProgressLine(steps, tokens_per_step=tokens))
        if policy.comms:
            subscribers.append(CommsLog(_path(policy, policy.comms, "comms.jsonl")))
    if policy.trace is not None:
        subscribers.append(Trace(engine, policy.output_dir, policy.trace))
    if not writers and not subscribers:
        return None
    return Monitor(engine, writers, sources, subscribers, policy.log_interval)


def _writers(engine: Engine, policy: MonitorConfig) -> list[Writer]:
    wanted: tuple[tuple[Callable[[Path], Writer], bool | str, str], ...] = (
        (JsonLines, policy.jsonl, "steps.jsonl"),
        (CsvFile, policy.csv, "steps.csv"),
        (TensorBoard, policy.tensorboard, ""),
    )
    writers = [kind(_path(policy, path, name)) for kind, path, name in wanted if path]
    if policy.wandb is not None:
        writers.append(WandbRun(policy.output_dir, policy.wandb, engine.config.to_mapping()))
    return writers


def _path(policy: MonitorConfig, path: bool | str, name: str) -> Path:
    return Path(path) if isinstance(path, str) else Path(policy.output_dir) / name
