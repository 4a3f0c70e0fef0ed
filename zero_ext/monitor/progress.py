"""Lines for people on stderr: a progress line that moves, and a line every few steps."""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from zero_ext.config.events import DeviceStepEnd, Event, StepEnd
from zero_ext.monitor.process_memory import resident_bytes
from zero_ext.monitor.sources import Source

_STEPS_AVERAGED = 10
_LINES_WITHOUT_TERMINAL = 10
# Groups of values that a line of `StepLog` shows, with unit and factor.
_SHOWN = {"time": (" s", 1.0), "wait": (" s", 1.0), "memory": (" GiB", 2.0**-30), "flops": ("", 1.0)}


def on_a_terminal() -> bool:
    """Return whether a progress bar would be seen: stderr is a terminal."""
    return Console(stderr=True).is_terminal


class ProgressLine:
    """Keep one line up to date on a terminal, or print about ten lines into a log.

    A subscriber: give it to [`subscribe`][zero_ext.monitor.subscribe]. The loss shown is the event's, else
    the last one given to `show_loss` (a plain loop calls `loss.backward()` itself, so the engine never sees
    it). Tokens per second are those of all ranks, averaged over the last ten steps without the first, which
    includes set-up. Memory is this process's resident set. Use it on one rank, as a context manager or with
    `close`.

    Args:
        steps: steps of the whole run.
        tokens_per_step: tokens that all ranks together see in a step; None leaves the speed in steps.
        title: text in front of the bar.
        first_step: steps already done when a run is resumed.
        console: where to write, by default rich's own on stderr.

    Raises:
        ValueError: not 0 <= `first_step` <= `steps`, or no step.
    """

    def __init__(
        self,
        steps: int,
        *,
        tokens_per_step: int | None = None,
        title: str = "training",
        first_step: int = 0,
        console: Console | None = None,
    ) -> None:
        if steps < 1 or not 0 <= first_step <= steps:
            raise ValueError(
                f"first_step: expected 0 <= first_step <= steps and at least one step, got first_step "
                f"{first_step} and steps {steps}. Pass the steps of the whole run as steps."
            )
        self._steps = steps
        self._tokens_per_step = tokens_per_step
        self._title = title
        self._console = console or Console(stderr=True)
        self._seconds: deque[float] = deque(maxlen=_STEPS_AVERAGED)
        self._is_set_up = False
        self._loss: float | None = None
        self._progress = Progress(
            TextColumn(title),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task(title, total=steps, completed=first_step, facts="")
        self._progress.start()

    def show_loss(self, loss: float) -> None:
        """Show a loss with the next step.

        Args:
            loss: the number.
        """
        self._loss = loss

    def __call__(self, event: Event) -> None:
        """Move the line on at each `StepEnd`.

        Args:
            event: any event of an engine.
        """
        if isinstance(event, DeviceStepEnd | StepEnd) and event.loss is not None:
            self._loss = event.loss
        if not isinstance(event, StepEnd):
            return
        if self._is_set_up:
            self._seconds.append(event.seconds)
        self._is_set_up = True
        facts = self._facts(event)
        self._progress.update(self._task, completed=event.step, facts=facts)
        every = max(1, self._steps // _LINES_WITHOUT_TERMINAL)
        if not self._console.is_terminal and (event.step % every == 0 or event.step == self._steps):
            line = f"{self._title} {event.step}/{self._steps}  {facts}"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Stop updating; the line stays as it is."""
        self._progress.stop()

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _facts(self, event: StepEnd) -> str:
        facts = [] if self._loss is None else [f"loss {self._loss:.3f}"]
        if self._seconds:
            steps_a_second = len(self._seconds) / max(sum(self._seconds), 1e-9)
            if self._tokens_per_step is None:
                facts.append(f"{steps_a_second:.2f} steps/s")
            else:
                facts.append(f"{steps_a_second * self._tokens_per_step:,.0f} tokens/s")
        facts.append(f"{resident_bytes() / 2**30:.2f} GiB")
        if event.skipped:
            facts.append(f"skipped for overflow, scale {event.loss_scale:g}")
        return "  ".join(facts)


class StepLog:
    """Print a line to stderr every few steps.

    A subscriber. A line has step, loss, rates, gradient norm, loss scale and time, and of that step what
    `sources` say of times and memory. Loss and norm of an accelerator are those of an earlier step, as a rule
    the one before, and say so.

    Args:
        steps: steps from line to line.
        sources: get the events before this does.
    """

    def __init__(self, steps: int, sources: Sequence[Source] = ()) -> None:
        self._steps = steps
        self._sources = tuple(sources)
        self._seconds = 0.0
        self._skipped = 0
        self._device_end: DeviceStepEnd | None = None

    def __call__(self, event: Event) -> None:
        """Print a line if a step ends that is due.

        Args:
            event: any event of an engine.
        """
        if isinstance(event, DeviceStepEnd):
            self._device_end = event
        if not isinstance(event, StepEnd):
            return
        self._seconds += event.seconds
        self._skipped += event.skipped
        if event.step % self._steps:
            return
        facts = [f"step {event.step}", *self._late("loss", "loss", event)]
        facts.append("lr " + ", ".join(f"{lr:.4g}" for lr in event.lr))
        facts += self._late("gradient norm", "grad_norm", event)
        if event.loss_scale != 1.0:
            facts.append(f"loss scale {event.loss_scale:g}, {self._skipped} skipped")
        facts.append(f"{self._seconds / self._steps:.3g} s a step")
        facts += self._groups(event)
        print(" | ".join(facts), file=sys.stderr, flush=True)
        self._seconds, self._skipped = 0.0, 0

    def _late(self, label: str, name: str, event: StepEnd) -> list[str]:
        """Return a number of the step that ``event`` reports, or of the last one that the device ended."""
        value, step, ended = getattr(event, name), "", self._device_end
        if value is None and ended is not None and ended.step > event.step - self._steps:
            value, step = getattr(ended, name), f" of step {ended.step}"
        return [] if value is None else [f"{label}{step} {value:.4g}"]

    def _groups(self, event: StepEnd) -> list[str]:
        found: defaultdict[str, list[str]] = defaultdict(list)
        for source in self._sources:
            for name, value in source.values(event).items():
                group, _, what = name.partition("/")
                if group in _SHOWN and value and not isinstance(value, tuple):
                    unit, factor = _SHOWN[group]
                    found[group].append(f"{what} {value * factor:.3g}{unit}")
        return [f"{group}: {', '.join(values)}" for group, values in found.items()]
