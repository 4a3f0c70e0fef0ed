"""Adam and AdamW in one pass over flat shards (Kingma & Ba 2015; Loshchilov & Hutter 2019)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from zero_ext.config import Tier
from zero_ext.offload import MASTER, AdamWork, NvmeState, StepPart, StepStaging, Values, stream_adam
from zero_ext.optim.moments import EightBitMoments, FloatMoments, Moments, MomentsDtype
from zero_ext.optim.stepper import OwnedRange, Segment, Update


class AdamStepper:
    """Fused Adam over owned ranges: unscale, clip, update, cast to compute precision in one pass of memory.

    Hyper-parameters are read from the live ``groups`` at each step; every parameter counts its own steps,
    as torch's do. Moments are fp32, bf16 or "8bit".
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        ranges: Sequence[OwnedRange],
        moments_dtype: MomentsDtype,
        staging: StepStaging,
    ) -> None:
        self._groups = groups
        self._ranges = tuple(ranges)
        self._staging = staging
        self._steps = {segment.name: 0 for owned in ranges for segment in owned.segments}
        self._kept_steps: dict[int, dict[str, int]] = {}
        self._moments: Moments = (
            EightBitMoments(ranges) if moments_dtype == "8bit" else FloatMoments(ranges, moments_dtype)
        )

    def step(self, updates: Sequence[Update], scale: torch.Tensor, used: frozenset[str]) -> Iterator[int]:
        """See :class:`Stepper`. Gradients may be fp32, bf16 or fp16."""
        stored: list[AdamWork] = []
        in_storage: list[int] = []
        for update in updates:
            owned = self._ranges[update.index]
            bounds, rows = self._rows(owned, used)
            if isinstance(owned.state, NvmeState):
                in_storage.append(update.index)
                stored.append(AdamWork(owned.state, update.gradient, owned.output, bounds, rows))
                continue
            output, tier = owned.output, owned.state.tier
            for part in self._staging.parts(tier, update.gradient, output):
                self._step_part(update.index, part, bounds, rows, scale)
            yield update.index
        if stored:
            # All ranges in one pipeline: between two of them nothing has to drain.
            stream_adam(stored, scale)
            yield from in_storage

    def _rows(
        self, owned: OwnedRange, used: frozenset[str]
    ) -> tuple[list[tuple[int, int]], list[list[float]]]:
        """Element ranges to step and the hyper-parameters of each; the parameters' steps are counted."""
        for name in {segment.name for segment in owned.segments if segment.name in used}:
            self._steps[name] += 1
        bounds: list[tuple[int, int]] = []
        rows: list[list[float]] = []
        for segment in owned.segments:
            if segment.name not in used or not segment.numel:
                continue
            row = self._hyper_parameters(segment)
            begin, end = segment.begin, segment.begin + segment.numel
            if rows and rows[-1] == row and bounds[-1][1] == begin:
                bounds[-1] = (bounds[-1][0], end)
            else:
                bounds.append((begin, end))
                rows.append(row)
        return bounds, rows

    def _step_part(
        self,
        index: int,
        part: StepPart,
        bounds: list[tuple[int, int]],
        rows: list[list[float]],
        scale: torch.Tensor,
    ) -> None:
        inside = [
            (max(begin, part.begin) - part.begin, min(end, part.end) - part.begin) for begin, end in bounds
        ]
        kept = [number for number, (begin, end) in enumerate(inside) if begin < end]
        covered = sum(inside[number][1] - inside[number][0] for number in kept)
        if part.staged is not None and covered < part.end - part.begin:
            # All of it goes back, so elements that the step leaves alone need the value they have.
            part.staged.copy_(self._ranges[index].state.read(MASTER, part.begin, part.end))
        if kept:
            segments = torch.tensor([inside[number] for number in kept], dtype=torch.int64)
            hyper = torch.tensor([rows[number] for number in kept], dtype=torch.float64)
            self._moments.update(index, part, segments, hyper, scale)

    def _hyper_parameters(self, segment: Segment) -> list[float]:
        group = self._groups[segment.group]
        beta1, beta2 = group["betas"]
        decoupled = group.get("decoupled_weight_decay", False)
        return [
            float(group["lr"]),
            float(beta1),
            float(beta2),
            float(group["eps"]),
            float(group["weight_decay"]),
            float(self._steps[segment.name]),
            float(bool(decoupled)),
            float(bool(group["maximize"])),
        ]

    def keep(self, index: int) -> None:
        """See :class:`Stepper`."""
        owned = self._ranges[index]
        self._kept_steps[index] = {segment.name: self._steps[segment.name] for segment in owned.segments}
        owned.state.keep()

    def settle(self, index: int) -> None:
        """See :class:`Stepper`."""
        self._ranges[index].state.settle()

    def take_back(self, index: int) -> None:
        """See :class:`Stepper`."""
        self._steps.update(self._kept_steps[index])
        self._ranges[index].state.take_back()

    def values(self, index: int) -> Iterator[tuple[str, Segment, Values]]:
        """See :class:`Stepper`: ``exp_avg`` and ``exp_avg_sq``."""
        return self._moments.values(index)

    def scalars(self) -> dict[str, Any]:
        """See :class:`Stepper`: the number of steps of every parameter."""
        return {"step": dict(self._steps)}

    def load_scalars(self, state: dict[str, Any]) -> None:
        """See :class:`Stepper`."""
        for name in self._steps:
            self._steps[name] = int(state["step"][name])

    def make_state(self, kinds: Mapping[str, tuple[str, ...]]) -> Callable[[], None]:
        """See :class:`Stepper`; the moments exist from the start."""
        return lambda: None

    def state_bytes(self) -> Mapping[Tier, int]:
        """See :class:`Stepper`: none, the moments lie beside the master weights."""
        return {}
