"""Steps that a device was given before the host knows whether it makes them."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch

from zero_ext.zero.gradients.gradient_norms import OwnSquares
from zero_ext.zero.step.step_verdict import Verdict

_STEPS_AHEAD = 16  # that the host may be before a device, before it waits for a verdict


class DecidedStep(NamedTuple):
    """A step that is decided by ``verdict``, with what it takes to undo and to explain it."""

    number: int  # from 1
    verdict: Verdict
    squares: OwnSquares | None
    edited: str
    scalars: dict[str, Any]  # the stepper's before it

    def non_finite(self) -> set[tuple[int, int]] | None:
        """Unit and number of the parameters whose gradients were not finite on this rank, if it was noted."""
        if self.squares is None or self.squares.non_finite is None:
            return None
        counts = self.squares.non_finite.tolist()
        return {key for key, count in zip(self.squares.keys, counts, strict=True) if count}


class LaunchedSteps:
    """The steps whose verdicts the host has not seen. Once one is bad, it and all that follow change nothing,
    until :meth:`pop_bad`.

    Verdicts are the same on all ranks, but come to them at different times: the ranks agree on whether any
    has seen a bad one (see :class:`~zero_ext.zero.gradients.reducer.Listener`) before they raise it together.
    """

    def __init__(self) -> None:
        self._steps: deque[DecidedStep] = deque()
        self._bad: DecidedStep | None = None
        self._halted: torch.Tensor | None = None  # 0, or NaN since a bad verdict; on the device

    def __bool__(self) -> bool:
        return bool(self._steps)

    def add(self, step: DecidedStep, scale: torch.Tensor) -> torch.Tensor:
        """Take a step about to be launched; return its ``scale`` (0-d float32), NaN after a bad verdict."""
        self._steps.append(step)
        none = scale * 0
        self._halted = none if self._halted is None else self._halted + none
        return scale + self._halted

    @property
    def seen_bad(self) -> bool:
        """Whether the host has seen a bad verdict."""
        return self._bad is not None

    def look(self, wait: bool) -> DecidedStep | None:
        """Look at the verdicts that have arrived, or ``wait`` for all; return the step whose bad verdict is
        seen by this for the first time."""
        while self._steps and (wait or len(self._steps) > _STEPS_AHEAD or self._steps[0].verdict.arrived):
            step = self._steps.popleft()
            findings = step.verdict.read()
            if findings.refused or findings.overflow:
                self._steps.clear()
                self._bad = step
                return step
        return None

    def pop_bad(self) -> DecidedStep | None:
        """Return the step whose bad verdict was seen, if there is one. Those launched from now on count."""
        bad = self._bad
        self.clear()
        return bad

    def clear(self) -> None:
        """Forget all steps: the state was replaced."""
        self._steps.clear()
        self._bad = self._halted = None
