"""What the progress line says, on a terminal and in a log."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from zero_ext.config.events import ReleaseEvent, StepEnd
from zero_ext.monitor import ProgressLine


def step(number: int, seconds: float, loss: float | None = None, skipped: bool = False) -> StepEnd:
    return StepEnd(number, loss, None, (1e-3,), skipped, 1024.0, seconds)


def console(terminal: bool) -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, force_terminal=terminal, width=120), text


def test_a_log_gets_about_ten_lines_with_loss_speed_and_memory() -> None:
    where, text = console(terminal=False)
    with ProgressLine(40, tokens_per_step=1000, title="demo", console=where) as line:
        line(ReleaseEvent("layers.0", 4))
        for number in range(1, 41):
            line.show_loss(10.0 - number / 8)
            line(step(number, seconds=100.0 if number == 1 else 0.5))
    lines = text.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[0].startswith("demo 4/40  loss 9.500  2,000 tokens/s  ")
    assert lines[-1].startswith("demo 40/40  loss 5.000  2,000 tokens/s  ")
    assert all(re.search(r"\d\.\d\d GiB$", line) for line in lines)


def test_the_events_own_loss_wins_and_skips_are_said() -> None:
    where, text = console(terminal=False)
    with ProgressLine(2, console=where) as line:
        line.show_loss(9.0)
        line(step(1, 1.0, loss=3.0))
        line(step(2, 0.25, skipped=True))
    first, second = text.getvalue().splitlines()
    assert first.startswith("training 1/2  loss 3.000  ") and "/s" not in first
    assert "4.00 steps/s" in second and second.endswith("skipped for overflow, scale 1024")


def test_a_terminal_gets_one_line_that_moves() -> None:
    where, text = console(terminal=True)
    with ProgressLine(3, first_step=1, console=where) as line:
        line(step(2, 0.1, loss=1.5))
        line(step(3, 0.1, loss=1.25))
    assert "3/3" in text.getvalue() and "loss 1.250" in text.getvalue()


@pytest.mark.parametrize(("steps", "first_step"), [(0, 0), (5, 6), (5, -1)])
def test_impossible_lengths_are_refused(steps: int, first_step: int) -> None:
    with pytest.raises(
        ValueError, match=f"first_step: expected .*, got first_step {first_step} and steps {steps}"
    ):
        ProgressLine(steps, first_step=first_step)
