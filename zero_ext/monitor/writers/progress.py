"""A progress line: step, loss, tokens per second, memory, time left."""

from __future__ import annotations

from collections import deque
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from zero_ext.config.events import DeviceStepEnd, Event, StepEnd
from zero_ext.monitor.sources.process_memory import resident_bytes

_STEPS_AVERAGED = 10
_LINES_WITHOUT_TERMINAL = 10


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
        self._events = 0
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
        if isinstance(event, DeviceStepEnd) and event.loss is not None:
            self._loss = event.loss
        if not isinstance(event, StepEnd):
            return
        if self._events:
            self._seconds.append(event.seconds)
        self._events += 1
        if event.loss is not None:
            self._loss = event.loss
        facts = self._facts(event)
        self._progress.update(self._task, completed=event.step, facts=facts)
        every = max(1, self._steps // _LINES_WITHOUT_TERMINAL)
        if not self._console.is_terminal and (event.step % every == 0 or event.step == self._steps):
            self._console.print(
                f"{self._title} {event.step}/{self._steps}  {facts}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )

    def close(self) -> None:
        """Stop updating; the line stays as it is."""
        self._progress.stop()

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
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
