"""One step of the check: a program of its own with a time limit, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["passed", "failed", "skipped", "left out"]


def nothing_missing() -> str:
    """For steps that run on every machine."""
    return ""


@dataclass(frozen=True)
class Step:
    """A program to run.

    Attributes:
        name: a word, for `--only`, file names and tables.
        title: what it does, in a few words.
        command: the program and its arguments.
        limit: seconds that it may take at most.
        least: seconds below which it is not worth starting.
        budgeted: the program takes `--seconds`, keeps to it and says itself what it left out.
        missing: why it cannot run on this machine, or nothing.
        after: names of steps without which it makes no sense; it is skipped unless they passed.
        environment: variables beside those of this process.
        alone: nothing else may run beside it, as it uses all cores or measures time.
    """

    name: str
    title: str
    command: tuple[str, ...]
    limit: float
    least: float = 5.0
    budgeted: bool = False
    missing: Callable[[], str] = nothing_missing
    after: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    alone: bool = False


@dataclass(frozen=True)
class Bar:
    """A figure that has to reach something: at least `bar`, or at most where `most` is set."""

    name: str
    value: float
    bar: float
    unit: str = ""
    most: bool = False

    @property
    def met(self) -> bool:
        """Whether the figure reaches the bar; one that is not a number does not."""
        return self.value <= self.bar if self.most else self.value >= self.bar

    def text(self) -> str:
        """The figure and the bar, for a table."""
        return f"{self.value:.4g}{self.unit} ({'≤' if self.most else '≥'} {self.bar:g}{self.unit})"


@dataclass(frozen=True)
class Outcome:
    """What came of a step.

    Attributes:
        name, title: the step's.
        status: "left out" means that no time was left for it.
        seconds: of wall-clock time.
        reason: why it failed, was skipped or left out; for others a line to show.
        result: what its last line of JSON held, from a step that broke off too.
        log: file name of its output in the archive, empty if it never ran.
    """

    name: str
    title: str
    status: Status
    seconds: float = 0.0
    reason: str = ""
    result: Mapping[str, Any] = field(default_factory=dict)
    log: str = ""

    @property
    def bars(self) -> list[Bar]:
        """The figures that it was to reach."""
        return [Bar(**each) for each in self.result.get("bars", [])]

    @property
    def left_out(self) -> list[str]:
        """What the step itself had no time or no means for."""
        return [str(each) for each in self.result.get("left_out", [])]

    def json(self) -> dict[str, Any]:
        """For the report: everything, with each bar's verdict."""
        verdicts = [{**asdict(bar), "met": bar.met} for bar in self.bars]
        return {**asdict(self), "result": {**self.result, "bars": verdicts}}
