"""One sum over the ranks that decides a step, and its verdict, which comes from a device when that has it."""

from __future__ import annotations

import math
from collections import deque
from typing import Any, NamedTuple

import torch

from zero_ext import ops
from zero_ext.comm import Collectives
from zero_ext.offload import Device
from zero_ext.offload.side_stream import Readback
from zero_ext.optim.stepper import NonFiniteFlag
from zero_ext.zero.gradients.gradient_norms import OwnSquares
from zero_ext.zero.units.rank_groups import sum_over_model

FACTS = 8  # int64 values of a step's sum before the limbs of its norm
WEIGHTS = 5  # the place among them of the flag of weights that are not finite
DEVICE_ERROR = 7  # of the flag of an error that a kernel recorded
_STEPS_AHEAD = 16  # that the host may be before a device, before it waits for a verdict


class OwnFacts(NamedTuple):
    """One rank's part of a step's sum. ``settings`` and ``edits`` are checksums from 1 to 2**20 - 1 that have
    to be the same on all ranks."""

    settings: int
    edits: int
    gradients: bool  # a reduced gradient in host memory or on NVMe is not finite
    weights: bool  # the host has read that an earlier update left NaN or infinity
    updated: bool  # updates were made in backward that cannot be rolled back

    def values(self) -> torch.Tensor:
        """Return them as int64 [``FACTS``] in host memory, checksums with their squares."""
        checksums = (self.settings, self.settings**2, self.edits, self.edits**2)
        # The flag of an error in kernels is added on the device, where it is recorded.
        return torch.tensor([*checksums, *map(int, self[2:]), 0], dtype=torch.int64, device="cpu")


def sum_of_ranks(
    collectives: Collectives,
    device: Device,
    own: OwnFacts,
    squares: OwnSquares | None,
    flag: NonFiniteFlag | None,
    error: torch.Tensor | None,
) -> torch.Tensor:
    """Return the sum over the ranks that :class:`Verdict` takes; a collective.

    ``own`` are this rank's facts, as far as the host has them, ``squares`` its part of the norm, None where
    nothing asks for it. ``flag`` is raised on ``device`` where an earlier update left NaN or infinity; None
    where nobody looks. ``error`` int64 [n] is what kernels recorded, see
    :func:`zero_ext.ops.pop_device_error_`.
    """
    sums = own.values()
    if device.is_accelerator:
        (sums,) = device.to_tier("device", sums)
    if flag is not None:
        sums[WEIGHTS : WEIGHTS + 1].add_(flag.on(device.device))
    if error is not None:
        sums[DEVICE_ERROR : DEVICE_ERROR + 1].add_(error[:1])
    if squares is not None:
        replicas = collectives.replicas
        counts = replicas is None or replicas.rank == 0  # or every replica would add the same squares
        limbs = squares.limbs if counts else torch.zeros_like(squares.limbs)
        if limbs.device.type == "cpu":
            (limbs,) = device.to_tier("device", limbs)
        sums = torch.cat([sums, limbs])
    collectives.sum_(sums, "agreement on the step")
    if collectives.model is not None:
        sums = sums.cpu()
        # Without the checksums, because ranks with other parts of the model have other settings and changes.
        sum_over_model(collectives.model, sums[4:], "agreement on the step over the model")
    return sums


class Findings(NamedTuple):
    """The content of a verdict, alike on all ranks."""

    settings_differ: bool
    edits_differ: bool
    gradients: bool
    weights: bool
    updated: bool
    device_error: bool
    norm: float | None  # of all unscaled gradients, None where nothing asked for it

    @property
    def overflow(self) -> bool:
        """Return whether the norm is not finite."""
        return self.norm is not None and not math.isfinite(self.norm)

    @property
    def refused(self) -> bool:
        """Return whether the step is not to be made, for another reason than its norm."""
        bad = self.settings_differ or self.edits_differ or self.gradients or self.weights
        return bad or self.device_error


class Verdict:
    """The decision whether a step is made, from ``sums``: the facts of all ``ranks`` and the limbs of their
    norm, if anything asks for it, int64 [``FACTS``] or [``FACTS + ops.ACCUMULATOR_ENTRIES``].

    On a device it is computed there. :meth:`scale` lets kernels obey it before the host reads it.
    ``unscale`` (0-d float32 in host memory) is one over the loss scale. ``error`` is what this rank's kernels
    recorded, see :func:`zero_ext.ops.pop_device_error_`; the host reads it with the verdict.
    """

    def __init__(
        self, sums: torch.Tensor, ranks: int, unscale: torch.Tensor, error: torch.Tensor | None = None
    ) -> None:
        facts, limbs = sums[:FACTS], sums[FACTS:]
        self._unscale = float(unscale)
        self.norm: torch.Tensor | None = None  # 0-d float64, before clipping
        if limbs.numel():
            self.norm = ops.squared_norm_value(limbs).sqrt() * self._unscale
        totals, squares = facts[:4].view(2, 2).unbind(1)
        square = totals * totals
        # Numbers are alike exactly if the square of their sum is N times the sum of
        # their squares. Simulated ranks send zeros, so the sum is that of one rank.
        differ = (square != ranks * squares) & (square != squares)
        found = torch.cat([differ, facts[4:] != 0])
        # Without ``found[4]``: updates made in backward are no reason to refuse the step.
        self._good = ~(found[:4].any() | found[5])
        report = [found.long()]
        if self.norm is not None:
            self._good &= torch.isfinite(self.norm)
            report.append(self.norm.view(1).view(torch.int64))  # its bits
        if error is not None:
            report.append(error.to(found.device))
        self._report = Readback(torch.cat(report))

    @property
    def arrived(self) -> bool:
        """Return whether :meth:`read` returns immediately."""
        return self._report.arrived

    def read(self) -> Findings:
        """Return what it says; the host waits for it."""
        values = self._report.read()
        norm = values[6:7].view(torch.float64).item() if self.norm is not None else None
        settings, edits, gradients, weights, updated, error = map(bool, values[:6].tolist())
        return Findings(settings, edits, gradients, weights, updated, error, norm)

    def read_error(self) -> torch.Tensor:
        """Return what this rank's kernels recorded, int64 in host memory; the host waits for it."""
        return self._report.read()[-ops.DEVICE_ERROR_WORDS :]

    def scale(self, clipping: float) -> torch.Tensor:
        """Return what gradients are multiplied with, 0-d float32, their norm clipped to ``clipping`` unless
        that is 0; NaN, with which kernels change nothing, where the step is not to be made."""
        unscale = torch.full((), self._unscale, dtype=torch.float32, device=self._good.device)
        return torch.where(self._good, gradient_scale(unscale, self.norm, clipping), torch.nan)


def gradient_scale(unscale: torch.Tensor, norm: torch.Tensor | float | None, clipping: float) -> torch.Tensor:
    """Return what gradients are multiplied with, 0-d float32: ``unscale`` (0-d float32), and less where their
    ``norm`` (0-d float64, on the same device) is above ``clipping``, unless that is 0."""
    scale = unscale.clone()
    if norm is not None and clipping:
        norm = torch.as_tensor(norm, dtype=torch.float64, device=scale.device)
        scale *= torch.clamp(clipping / (norm + 1e-6), max=1.0).float()
    return scale


class DecidedStep(NamedTuple):
    """A step that is decided by ``verdict``, with what it takes to undo and to explain it."""

    number: int  # from 1
    verdict: Verdict
    squares: OwnSquares | None
    edited: str
    scalars: dict[str, Any]  # the stepper's before it

    def non_finite(self) -> set[tuple[int, int]] | None:
        """Return unit and number of the parameters with gradients not finite on this rank, if noted."""
        if self.squares is None or self.squares.non_finite is None:
            return None
        counts = self.squares.non_finite.tolist()
        return {key for key, count in zip(self.squares.keys, counts, strict=True) if count}


class LaunchedSteps:
    """The steps with verdicts that the host has not read. Once one is bad, it and all that follow change
    nothing, until :meth:`pop_bad`.

    Verdicts are the same on all ranks, but come to them at different times: the ranks agree on whether any
    has seen a bad one (see :class:`~zero_ext.zero.gradients.reducer.Listener`) before they raise it together.
    """

    def __init__(self) -> None:
        self._steps: deque[DecidedStep] = deque()
        self._bad: DecidedStep | None = None
        self._halted: torch.Tensor | None = None  # on the device: 0, or NaN since a bad verdict

    def __bool__(self) -> bool:
        return bool(self._steps)

    def add(self, step: DecidedStep, scale: torch.Tensor) -> torch.Tensor:
        """Take a step about to be launched; return its ``scale`` (0-d float32), NaN after a bad verdict."""
        self._steps.append(step)
        # NaN if the scale is, else 0. So the sum stays NaN from the first bad step
        # on, without a read by the host.
        none = scale * 0
        self._halted = none if self._halted is None else self._halted + none
        return scale + self._halted

    @property
    def seen_bad(self) -> bool:
        """Return whether the host has seen a bad verdict."""
        return self._bad is not None

    def look(self, wait: bool) -> DecidedStep | None:
        """Look at the verdicts that have arrived, or ``wait`` for all; return the step with the bad verdict
        that is seen by this for the first time."""
        while self._steps and (wait or len(self._steps) > _STEPS_AHEAD or self._steps[0].verdict.arrived):
            step = self._steps.popleft()
            findings = step.verdict.read()
            if findings.refused or findings.overflow:
                self._steps.clear()
                self._bad = step
                return step
        return None

    def pop_bad(self) -> DecidedStep | None:
        """Return the step with a bad verdict that was read, if any. Those launched from now on count."""
        bad = self._bad
        self.clear()
        return bad

    def clear(self) -> None:
        """Forget all steps: the state was replaced."""
        self._steps.clear()
        self._bad = self._halted = None
